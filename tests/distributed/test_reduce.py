"""Sums of ranks join to those of the step, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_branch.objective.losses import LossSums
from megatron_branch.objective.reduce import reduce_losses
from tests.harness import run_ranks

FIELDS = tuple(LossSums.__dataclass_fields__)


def join() -> tuple[list[float], list[float]]:
    """Rank 0 has no loss (a stage without the head); the second axis has one rank."""
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    own = LossSums.zero(torch.device("cpu"))
    if rank == 1:
        own = LossSums(*(torch.tensor(10.0 + place, dtype=torch.float64) for place in range(len(FIELDS))))
    assert dist.group.WORLD is not None
    joined = reduce_losses(own, [dist.group.WORLD, alone])
    doubled = reduce_losses(joined, [dist.group.WORLD])
    return [getattr(joined, name).item() for name in FIELDS], [getattr(doubled, name).item() for name in FIELDS]


def test_every_rank_gets_the_sums_of_the_step() -> None:
    sums = [10.0 + place for place in range(len(FIELDS) - 1)]
    largest = 10.0 + FIELDS.index("max_log_ratio")
    assert run_ranks(2, join) == [([*sums, largest], [*(2 * value for value in sums), largest])] * 2
