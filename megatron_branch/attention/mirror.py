"""Collectives between local order (a block and its mirror image) and pack order.

Shapes: t local tokens of two equal blocks, S = cp * t tokens of the whole pack.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these two; earlier versions know only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_pack(x_t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather `[t, ...]` along tokens into pack order `[S, ...]`."""
    cp = dist.get_world_size(group)
    gathered = x_t.new_empty((cp * x_t.shape[0], *x_t.shape[1:]))
    all_gather_single(gathered, x_t.contiguous(), group=group)
    blocks = gathered.view(cp, 2, -1, *x_t.shape[1:])
    return torch.cat([blocks[:, 0], blocks[:, 1].flip(0)]).flatten(0, 1)


def scatter_pack(x_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `[S, ...]` in pack order over the ranks; each gets its own `[t, ...]` in local order."""
    cp = dist.get_world_size(group)
    blocks = x_S.view(2 * cp, -1, *x_S.shape[1:])
    ordered = torch.stack([blocks[:cp], blocks[cp:].flip(0)], dim=1).contiguous()
    local = x_S.new_empty((x_S.shape[0] // cp, *x_S.shape[1:]))
    reduce_scatter_single(local, ordered.view(x_S.shape), group=group)
    return local
