"""Between local order (a block and its mirror image on each rank) and pack order, with the collectives of pass-Q.

Shapes: R ranks, t local tokens of two equal blocks, S = R * t tokens of the whole pack.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these two; earlier versions know only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def to_pack_order(x_Rt: Tensor) -> Tensor:
    """`[R, t, ...]`, each rank's tokens in local order, into pack order `[S, ...]`; differentiable."""
    blocks = x_Rt.unflatten(1, (2, -1))
    return torch.cat([blocks[:, 0], blocks[:, 1].flip(0)]).flatten(0, 1)


def to_local_order(x_S: Tensor, ranks: int) -> Tensor:
    """The inverse of `to_pack_order` for `ranks` ranks: `[S, ...]` into `[R, t, ...]`; differentiable."""
    blocks = x_S.unflatten(0, (2 * ranks, -1))
    return torch.stack([blocks[:ranks], blocks[ranks:].flip(0)], dim=1).flatten(1, 2)


def gather_pack(x_t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather `[t, ...]` along tokens into pack order `[S, ...]`."""
    cp = dist.get_world_size(group)
    gathered = x_t.new_empty((cp * x_t.shape[0], *x_t.shape[1:]))
    all_gather_single(gathered, x_t.contiguous(), group=group)
    return to_pack_order(gathered.view(cp, *x_t.shape))


def scatter_pack(x_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `[S, ...]` in pack order over the ranks; each gets its own `[t, ...]` in local order."""
    cp = dist.get_world_size(group)
    local = x_S.new_empty((x_S.shape[0] // cp, *x_S.shape[1:]))
    reduce_scatter_single(local, to_local_order(x_S, cp).flatten(0, 1), group=group)
    return local
