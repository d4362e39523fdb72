"""Process groups as one frozen value.

Ranks are laid out as Megatron does (tp fastest, then cp, dp, pp), so that Megatron's own layers and this value agree.

Always true:
- `dp * cp * tp * pp` is the number of ranks;
- every rank is in exactly one group of each axis;
- `ranks` of an axis stand in the order of the coordinate along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

LONGEST_WAIT = timedelta(days=30)  # where the watchdog ends what hangs, waiting for a slower rank is no fault


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it.

    Attributes:
        size: number of ranks along the axis.
        rank: own coordinate.
        group: the process group.
        ranks: global ranks of the group, by coordinate.
    """

    size: int
    rank: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """All axes. `dp_cp` holds the replicas of each parameter; `model` (tp x pp) holds one copy of the model;
    `embedding` joins the first and the last stage (None on other stages and when pp = 1).

    `ulysses` x `pass_q` is `cp`: consecutive ranks of `cp` exchange heads, ranks of equal place in their Ulysses groups
    pass queries. Each is None for one rank. `wait` is how long their collectives may take; None: torch's default.
    """

    dp: Axis
    cp: Axis
    tp: Axis
    pp: Axis
    dp_cp: Axis
    model: Axis
    embedding: Axis | None
    ulysses: Axis | None
    pass_q: Axis | None
    wait: timedelta | None = None

    @property
    def first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def _axis(group: dist.ProcessGroup) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(size=len(ranks), rank=ranks.index(dist.get_rank()), group=group, ranks=ranks)


def _part_of_cp(cp: Axis, *, size: int, stride: int, wait: timedelta | None) -> Axis | None:
    """The ranks `first + k * stride`, k < size, of the context-parallel axis that this rank is one of (collective)."""
    if size == 1:
        return None
    if size == cp.size:
        return cp
    every: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, cp.ranks)
    mine = None
    for ranks in sorted(set(every)):
        for first in range(cp.size):
            if first // stride % size == 0:
                group = dist.new_group([ranks[first + k * stride] for k in range(size)], timeout=wait)
                if dist.get_rank() in dist.get_process_group_ranks(group):
                    mine = _axis(group)
    return mine


def build_groups(*, dp: int, cp: int, tp: int, pp: int, ulysses: int = 1, wait: timedelta | None = None) -> Groups:
    """Create the groups (collective; torch.distributed must be initialised) and make Megatron's layers use them.

    Args:
        dp, cp, tp, pp: sizes of the axes.
        ulysses: size of the Ulysses groups, a divisor of cp.
        wait: how long a collective may take; None: Megatron's default.
    """
    assert dp * cp * tp * pp == dist.get_world_size(), "see checked.check_world_size"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        create_gloo_process_groups=False,
        **({} if wait is None else {"distributed_timeout_minutes": math.ceil(wait.total_seconds() / 60)}),
    )
    return megatron_groups(ulysses=ulysses, wait=wait)


def megatron_groups(*, ulysses: int = 1, wait: timedelta | None = None) -> Groups:
    """The groups that Megatron has made already (collective where `ulysses` needs groups of its own).

    Args:
        ulysses: size of the Ulysses groups, a divisor of cp.
        wait: how long a collective of groups beside Megatron's may take; None: torch's default.
    """
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    ends = None
    if pp > 1 and (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        ends = _axis(parallel_state.get_embedding_group())
    context = _axis(parallel_state.get_context_parallel_group())
    assert context.size % ulysses == 0, "see ParallelConfig"
    return Groups(
        dp=_axis(parallel_state.get_data_parallel_group()),
        cp=context,
        tp=_axis(parallel_state.get_tensor_model_parallel_group()),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        dp_cp=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        model=_axis(parallel_state.get_model_parallel_group()),
        embedding=ends,
        ulysses=_part_of_cp(context, size=ulysses, stride=1, wait=wait),
        pass_q=_part_of_cp(context, size=context.size // ulysses, stride=ulysses, wait=wait),
        wait=wait,
    )
