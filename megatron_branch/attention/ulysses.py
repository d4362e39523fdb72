"""Ulysses: before attention u ranks exchange their tokens for heads, after it they exchange back.

Each rank brings all heads of its own tokens and leaves with its share of the heads of all the group's tokens. Rank j
gets query heads `[j * H / u, (j + 1) * H / u)` and the KV heads that these use: G / u of them, or, with more ranks than
KV heads, one that u / G ranks hold a replica of. A replica's gradient is the sum over its own query heads only, and the
backward of the exchange adds the replicas up; so a state that is kept after the exchange, and the adjoint that is added
into it, must enter the backward there too, each replica's on its own rank.

The exchange is that of DeepSpeed-Ulysses (Jacobs et al., 2023). Everything is made of differentiable operations and of
one collective, whose backward is itself.

Shapes: u ranks of the group, t local tokens (padding included), S = u * t tokens of the group, H query heads,
G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.attention.mirror import to_local_order, to_pack_order


class _AllToAll(torch.autograd.Function):
    """Row j of `[u, ...]` goes to rank j; row j of the result came from rank j."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllToAll.apply(gradient, ctx.group), None


def tokens_to_heads(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange tokens for heads, in one collective.

    Args:
        parts: tensors `[t, heads, D]` in local order, whose heads u divides, or that are KV heads whose number
            divides u.
        group: the u ranks; they stand in the order of their blocks.

    Returns:
        Of each `[S, max(heads / u, 1), D]`, in local order of the group's shard: the first blocks of all ranks, then
        the mirrored ones.
    """
    ranks = dist.get_world_size(group)
    shares = [_shares(part, ranks) for part in parts]
    received_utHD = _AllToAll.apply(torch.cat(shares, dim=2), group)
    exchanged_SHD = to_pack_order(received_utHD)
    return exchanged_SHD.split([share.shape[2] for share in shares], dim=1)


def heads_to_tokens(part_SHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back for query heads: `[S, H / u, D]` into `[t, H, D]`."""
    received_utHD = _AllToAll.apply(to_local_order(part_SHD, dist.get_world_size(group)), group)
    return received_utHD.transpose(0, 1).flatten(1, 2)


def _shares(part_tHD: Tensor, ranks: int) -> Tensor:
    """`[u, t, max(heads / u, 1), D]`: what each rank gets of these heads."""
    heads = part_tHD.shape[1]
    if heads < ranks:
        part_tHD = part_tHD.repeat_interleave(ranks // heads, dim=1)
    return part_tHD.unflatten(1, (ranks, -1)).transpose(0, 1)
