"""Process groups as one frozen value.

Ranks are laid out as Megatron does (tp fastest, then cp, dp, pp), so that Megatron's own layers and this value agree.

Always true:
- `dp * cp * tp * pp` is the number of ranks;
- every rank is in exactly one group of each axis;
- `ranks` of an axis stand in the order of the coordinate along it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


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
    `embedding` joins the first and the last stage (None on other stages and when pp = 1)."""

    dp: Axis
    cp: Axis
    tp: Axis
    pp: Axis
    dp_cp: Axis
    model: Axis
    embedding: Axis | None

    @property
    def first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def _axis(group: dist.ProcessGroup) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(size=len(ranks), rank=ranks.index(dist.get_rank()), group=group, ranks=ranks)


def build_groups(*, dp: int, cp: int, tp: int, pp: int) -> Groups:
    """Create the groups (collective; torch.distributed must be initialised) and make Megatron's layers use them."""
    assert dp * cp * tp * pp == dist.get_world_size(), "see checked.check_world_size"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        create_gloo_process_groups=False,
    )
    ends = None
    if pp > 1 and (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        ends = _axis(parallel_state.get_embedding_group())
    return Groups(
        dp=_axis(parallel_state.get_data_parallel_group()),
        cp=_axis(parallel_state.get_context_parallel_group()),
        tp=_axis(parallel_state.get_tensor_model_parallel_group()),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        dp_cp=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        model=_axis(parallel_state.get_model_parallel_group()),
        embedding=ends,
    )
