"""Attention of a pass: Ulysses inside, pass-Q outside; with cp = 1 neither, with one of the two layouts only that one.

Tokens are sharded over all context-parallel ranks outside attention. The exchange of heads makes of each Ulysses group
one rank of a smaller split (plan/shard.py), which has fewer heads and more tokens; pass-Q works over those. State and
adjoints are kept as attention sees them, after the exchange.

Shapes: t local tokens (padding included), H query heads, G KV heads of this tensor-parallel rank, D head size.
"""

from __future__ import annotations

from torch import Tensor

from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.attention.pass_q import pass_q_attention
from megatron_branch.attention.ulysses import heads_to_tokens, tokens_to_heads


def branch_attention(
    q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, unit: PassDescriptor, layer: int, *, scale: float | None = None
) -> Tensor:
    """Attention of a unit's tokens over its context and itself; differentiable, with the context's gradient added to
    the pages' adjoints as a side effect of the backward.

    Args:
        q_tHD: local queries after the rotary embedding.
        k_tGD, v_tGD: local keys (after the rotary embedding) and values; H is a multiple of G.
        unit: the pass.
        layer: the layer's number, the key into the pages.
        scale: what scores are multiplied with; None: D ** -0.5.

    Returns:
        `[t, H, D]` in the queries' dtype; rows of padding are zero.
    """
    group = unit.ulysses_group
    if group is not None:
        q_tHD, k_tGD, v_tGD = tokens_to_heads((q_tHD, k_tGD, v_tGD), group)
    unit.take_state(layer, k_tGD, v_tGD)
    out_tHD = pass_q_attention(q_tHD, k_tGD, v_tGD, unit, layer, scale=scale)
    return out_tHD if group is None else heads_to_tokens(out_tHD, group)


def leave_state(k_tGD: Tensor, v_tGD: Tensor, unit: PassDescriptor, layer: int) -> None:
    """The part of `branch_attention` that keeps keys and values, for a pass that needs no attention in this layer."""
    if unit.ulysses_group is not None:
        k_tGD, v_tGD = tokens_to_heads((k_tGD, v_tGD), unit.ulysses_group)
    unit.take_state(layer, k_tGD, v_tGD)
