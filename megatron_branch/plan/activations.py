"""What the graph of a retained chunk keeps, and which chunks are retained.

A retained chunk runs its capture with autograd and keeps the graph; its replay is then a backward alone. The formula
below adds up what the layers save for their backward, tensor by tensor; the chunk's keys and values are left out,
because the graph shares them with the state.

The rule of `auto`: chunks are looked at from the leaves up, and one is retained when the retained chunks on every path
below it and itself still fit the budget. Depth first, the chunks captured last are replayed first, and only the chunks
of one root-to-leaf path are held at a time. So a byte of the budget serves one chunk near the root, or one deep chunk
of each branch in turn; and the deeper a chunk, the more attention over its ancestors its second forward would cost.
Where chunks keep alike, as the near-equal chunks of one node do, no other choice within the budget saves more.

Always true:
- only replayed units are retained: constants of detached mode have no graph;
- the retained bytes of every root-to-leaf path are within the budget, on every stage and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.shard import shard_unit


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Bytes that the graph of a retained chunk keeps on one rank, for each `tokens` of its local tokens.

    Attributes:
        tokens: what the others are stated for; local tokens, padding included, are a multiple of it.
        plain: of a chunk without loss; on the last stage its last layer ends at keys and values.
        trained: of a chunk with loss, as if every token had one trained target.
    """

    tokens: int
    plain: int
    trained: int

    def of(self, unit: Unit, local_tokens: int) -> int:
        """Bytes of a unit of which the rank has `local_tokens`."""
        return local_tokens // self.tokens * (self.trained if unit.trained else self.plain)


@dataclass(frozen=True, slots=True)
class StageShape:
    """What one rank computes of the model.

    Attributes:
        layers: decoder layers of the pipeline stage.
        first: it embeds the token ids.
        last: it has the head.
        tp, cp: ranks that share heads and width, and tokens.
        ulysses: ranks among the latter that exchange tokens for heads around attention.
        sequence: ranks among the former that share the tokens between layers.
    """

    layers: int
    first: bool
    last: bool
    tp: int = 1
    cp: int = 1
    ulysses: int = 1
    sequence: int = 1


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are held.

    Attributes:
        dtype_bytes: bytes per element of the model's dtype.
        fused_norms: RMSNorm is one kernel, which keeps its input and one number per row (torch on a GPU). Otherwise
            (torch on a CPU) it keeps its input and the normalised input in the accumulation dtype.
    """

    dtype_bytes: int
    fused_norms: bool

    @property
    def accumulated(self) -> int:
        """Bytes per element in which norms and softmax sums are computed."""
        return 8 if self.dtype_bytes == 8 else 4

    def norm(self, width: int, groups: int = 1, *, input_kept: bool = False) -> int:
        """Bytes that RMSNorms of `groups` rows keep per token; `input_kept`: something else keeps the input."""
        statistic = groups * self.accumulated
        if self.fused_norms:
            return statistic + (0 if input_kept else groups * width * self.dtype_bytes)
        shared = input_kept and self.dtype_bytes == self.accumulated
        return statistic + groups * width * self.accumulated * (1 if shared else 2)


def activation_sizes(shape: ModelShape, stage: StageShape, precision: Precision, *, qk_norm: bool) -> ActivationSizes:
    """Sizes of a stage of Megatron's local layers with branch attention.

    Args:
        shape: the whole model.
        stage: what the rank computes of it.
        precision: dtype and norms.
        qk_norm: queries and keys are normalised per head.
    """
    e, tokens = precision.dtype_bytes, stage.sequence
    to_state, rest = _layer(shape, stage, precision, qk_norm=qk_norm)
    ids = tokens * (8 + (1 if stage.tp > 1 else 0)) if stage.first else 0  # token ids, and which are on this rank
    whole = ids + stage.layers * (to_state + rest)
    if not stage.first and not precision.fused_norms and e < precision.accumulated:
        whole += shape.hidden * e  # the stage's input, of which the first norm keeps a copy
    if not stage.last:
        whole += shape.hidden * e  # the stage's output
        return ActivationSizes(tokens, plain=whole, trained=whole)
    # Final norm; the head's rows, their indices and targets, log-sum-exp, entropy.
    head = precision.norm(shape.hidden) + tokens * (shape.hidden * e + 2 * 8 + 2 * precision.accumulated)
    return ActivationSizes(tokens, plain=whole - rest, trained=whole + head)


def _layer(shape: ModelShape, stage: StageShape, precision: Precision, *, qk_norm: bool) -> tuple[int, int]:
    """Bytes per `stage.sequence` tokens of what leads to keys and values, and of the rest of a layer."""
    e = precision.dtype_bytes
    heads, kv_heads, ffn = shape.heads // stage.tp, shape.kv_heads // stage.tp, shape.ffn // stage.tp
    query, values = heads * shape.head_dim, kv_heads * shape.head_dim
    # Between layers: two norms and their outputs.
    normed = precision.norm(shape.hidden) + shape.hidden * e
    # Inside them, per token. Cosine and sine of the keys' rotation.
    to_state = rotation = 2 * shape.head_dim * e
    if stage.ulysses == 1:
        to_state += (query + 2 * values) * e - values * e  # the fused product; values are a view of it, and are state
    elif qk_norm and (precision.fused_norms or e == precision.accumulated):
        to_state += (query + 2 * values) * e  # the fused product, for the norm of its keys
    # Rotated queries, attention output before and after heads are exchanged back, log-sum-exp of the whole pack.
    outputs = 1 if stage.ulysses == 1 else 2
    rest = rotation + (1 + outputs) * query * e + heads * precision.accumulated * stage.cp // stage.ulysses
    if qk_norm:
        to_state += precision.norm(shape.head_dim, kv_heads, input_kept=True)
        # The queries of a single group are a view of the fused product.
        rest += precision.norm(shape.head_dim, heads, input_kept=kv_heads == 1)
    rest += 5 * ffn * e  # gate and value in one product, value, activated gate, their product
    return normed + stage.sequence * to_state, normed + stage.sequence * rest


def with_retained(
    units: Sequence[Unit], config: BranchConfig, sizes: Sequence[ActivationSizes], *, cp: int
) -> tuple[Unit, ...]:
    """Mark the units of one tree whose graphs are retained, by the rule of the module.

    Args:
        units: of one tree, in depth-first order; `units[i].index == i`.
        config: `activations` and its budget.
        sizes: per pipeline stage; the fullest counts.
        cp: context-parallel ranks.
    """
    if config.activations == "recompute":
        return tuple(units)
    assert sizes, f"activations={config.activations} needs the sizes of the stages"
    budget = config.activation_budget_bytes
    below = [0] * len(units)  # most retained bytes on a path under each unit
    marked = list(units)
    for unit in reversed(units):
        on_path = below[unit.index]
        if unit.replayed:
            local = shard_unit((unit.tokens,), cp=cp, rank=0, align=sizes[0].tokens).local
            size = max(stage.of(unit, local) for stage in sizes)
            if budget is None or on_path + size <= budget:
                marked[unit.index] = replace(unit, retained_bytes=size)
                on_path += size
        if unit.context:
            parent = unit.context[-1]
            below[parent] = max(below[parent], on_path)
    return tuple(marked)
