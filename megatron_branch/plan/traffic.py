"""Bytes that a rank receives in the collectives of one layer of one pass, by the layouts of `attention/` and Megatron.

A ring passes (n - 1) / n of a gathered or scattered tensor through each of its n ranks, and an all-reduce twice that.

Always true:
- one rank alone receives nothing;
- the traffic of context parallelism depends on the pass, not on the length of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_branch.plan.cost import ModelShape


@dataclass(frozen=True, slots=True)
class Split:
    """How a pass is split.

    Attributes:
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        dtype_bytes: of activations.
        ulysses: context-parallel ranks that exchange heads with each other.
    """

    tp: int
    cp: int
    dtype_bytes: int
    ulysses: int = 1

    @property
    def precise(self) -> int:
        """Bytes in which softmax parts are merged and query gradients summed."""
        return 8 if self.dtype_bytes == 8 else 4


def tensor_parallel_bytes(local_tokens: int, shape: ModelShape, split: Split) -> float:
    """One layer, forward: two all-reduces of the hidden states of the local tokens; a backward has as many."""
    hidden = local_tokens * shape.hidden * split.dtype_bytes
    return 2 * 2 * hidden * (split.tp - 1) / split.tp


def context_parallel_bytes(local_tokens: int, shape: ModelShape, split: Split) -> tuple[float, float]:
    """One layer of attention, forward and backward: heads exchanged inside Ulysses groups, pass-Q between them."""
    exchanged = ulysses_bytes(local_tokens, shape, split)
    forward, backward = pass_q_bytes(local_tokens, shape, split)
    return exchanged + forward, exchanged + backward


def ulysses_bytes(local_tokens: int, shape: ModelShape, split: Split) -> float:
    """Queries, keys and values to the ranks of their heads, outputs back; a backward moves as much.

    With fewer KV heads than ranks every rank gets one.
    """
    heads, kv_heads = shape.heads // split.tp, max(shape.kv_heads // split.tp, split.ulysses)
    exchanged = local_tokens * (2 * heads + 2 * kv_heads) * shape.head_dim * split.dtype_bytes
    return exchanged * (split.ulysses - 1) / split.ulysses


def pass_q_bytes(local_tokens: int, shape: ModelShape, split: Split) -> tuple[float, float]:
    """Forward and backward of pass-Q over the ranks of equal place in their Ulysses groups.

    Forward: queries are gathered, log-sum-exps of every rank too, outputs are scattered in the merging precision.
    Backward: queries, outputs and their gradients are gathered, query gradients are scattered.
    """
    ranks = split.cp // split.ulysses
    if ranks == 1:
        return 0.0, 0.0
    heads = shape.heads // split.tp // split.ulysses
    others = (ranks - 1) * local_tokens * split.ulysses
    width = heads * shape.head_dim
    sums = others * ranks * heads * split.precise
    forward = others * width * (split.dtype_bytes + split.precise) + sums
    return forward, others * width * (3 * split.dtype_bytes + split.precise)
