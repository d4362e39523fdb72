"""What every pass of a rank shares: the state store, the links, the kernel, the timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_branch.attention.kernel import Kernel
from megatron_branch.engine.groups import Groups
from megatron_branch.plan.activations import ActivationSizes
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.link import Link
from megatron_branch.schedule.runner import ForwardStep, Runner, Timers
from megatron_branch.state.config import StateConfig
from megatron_branch.state.partition import Replicas
from megatron_branch.state.store import StateStore


@dataclass(eq=False)
class Runtime:
    """Made once per rank.

    Attributes:
        groups, kernel, link, store: see there.
        activations: bytes of retained graphs.
        loss_scale: undoes what the host divides gradients by.
        timers: called with the kind of each action.
        progress: called after each action.
    """

    groups: Groups
    kernel: Kernel
    link: Link
    store: StateStore
    timers: Timers
    activations: ActivationSizes
    loss_scale: float = 1.0
    progress: Callable[[Action], None] | None = None

    def runner(self, forward_step: ForwardStep, *, recompute_layers: bool) -> Runner:
        """A runner of this rank's stage around a forward step, for a plan with this `recompute_layers`."""
        return Runner(
            forward_step=forward_step,
            store=self.store,
            link=self.link,
            kernel=self.kernel,
            cp_group=self.groups.pass_q.group if self.groups.pass_q else None,
            ulysses_group=self.groups.ulysses.group if self.groups.ulysses else None,
            timers=self.timers,
            activations=self.activations,
            recompute_layers=recompute_layers,
            loss_scale=self.loss_scale,
            progress=self.progress,
        )


def build_store(groups: Groups, config: StateConfig, *, device: torch.device, sequence_parallel: bool) -> StateStore:
    """The store of a rank; stage inputs that tensor-parallel ranks share are kept once."""
    replicas = None if sequence_parallel else Replicas(groups.tp.group, groups.tp.size, groups.tp.rank)
    return StateStore(device, nvme_path=config.nvme_path, replicas=replicas)


def build_link(groups: Groups, *, dtype: torch.dtype, device: torch.device, hidden: int) -> Link:
    """Links to the neighbouring stages (collective over all ranks: makes a second communicator per pipeline)."""
    backward: Any = groups.pp.group
    if groups.pp.size > 1:
        every: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, groups.pp.ranks)
        for ranks in sorted({ranks for ranks in every if ranks is not None}):
            group = dist.new_group(list(ranks), timeout=groups.wait)
            if ranks == groups.pp.ranks:
                backward = group
    rank = groups.pp.rank
    return Link(
        previous=None if groups.first_stage else groups.pp.ranks[rank - 1],
        next=None if groups.last_stage else groups.pp.ranks[rank + 1],
        forward_group=groups.pp.group,
        backward_group=backward,
        dtype=dtype,
        device=device,
        hidden=hidden,
    )
