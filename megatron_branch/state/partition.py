"""What all ranks of a group hold alike is kept once: each keeps its rows, and they are gathered when used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.state.placement import own_rows


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same rows: those of tensor parallelism, for stage inputs.

    Ranks with rows of their own must not be put into one: gathering would then mix them up without an error.

    Attributes:
        group: the process group; None for one rank.
        size, rank: of the group.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows `[n, ...]` that this rank keeps of `[t, ...]`; memory of their own where it is not all of them."""
        if self.size == 1:
            return rows
        start, end = own_rows(rows.shape[0], self.size, self.rank)
        return rows[start:end].clone()

    def whole(self, part: Tensor, rows: int) -> Tensor:
        """All `[rows, ...]` again, from every rank's part (collective)."""
        if self.size == 1:
            return part
        block = -(-rows // self.size)
        padded = part.new_zeros((block, *part.shape[1:]))
        padded[: part.shape[0]] = part
        blocks = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(blocks, padded, group=self.group)
        return torch.cat(blocks)[:rows]
