"""Bytes that one pass takes on one rank while it runs, beside weights and the state of prefixes.

The graph of a pass is `plan/activations.py`'s. Here is what comes and goes: gradients inside a backward, the buffers of
pass-Q, the head's logits and its weight gradient. Upper bounds, read off the code that allocates.

Always true:
- nothing here depends on the length of the prefix but the gradient of one page's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.traffic import Split


@dataclass(frozen=True, slots=True)
class PassTokens:
    """Sizes of the largest pass of a rank.

    Attributes:
        local: its tokens on one rank, padding included.
        rows: positions at which the head runs on one rank.
        page: most tokens of one captured chunk on one rank.
    """

    local: int
    rows: int
    page: int


def attention_buffer_bytes(tokens: PassTokens, shape: ModelShape, split: Split) -> int:
    """Queries, outputs and their gradients of the whole pass, gathered and put in order; sums in the merging precision;
    one page's key and value gradients.
    """
    heads, kv_heads = shape.heads // split.tp // split.ulysses, max(shape.kv_heads // split.tp // split.ulysses, 1)
    width = tokens.local * split.cp * heads * shape.head_dim
    several = split.cp > split.ulysses
    sums = 2 * split.precise + split.dtype_bytes
    buffers = max(6 * split.dtype_bytes * several, 3 * split.dtype_bytes * several + sums)
    page = 2 * tokens.page * split.ulysses * kv_heads * shape.head_dim * split.dtype_bytes
    return width * buffers + page


def head_bytes(tokens: PassTokens, shape: ModelShape, split: Split, *, chunk_tokens: int) -> int:
    """Logits of one chunk of rows (as computed, in the softmax's precision, their gradient), and the gradient of the
    output weight, summed in that precision and then rounded to the weights' own.
    """
    if not tokens.rows:
        return 0
    vocab = -(-shape.vocab // split.tp)
    logits = min(chunk_tokens, tokens.rows) * vocab * (split.dtype_bytes + 2 * split.precise)
    return logits + vocab * shape.hidden * (split.precise + split.dtype_bytes)
