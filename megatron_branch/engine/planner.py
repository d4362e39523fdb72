"""Plans a step and cuts this rank's part from it: the one place where rollouts become a batch for the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_branch.engine.runtime import Runtime
from megatron_branch.engine.step_batch import StepBatch
from megatron_branch.objective.advantages import advantages
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.plan.serial import digest
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import depth_first, match_passes, scoring_orders, training_orders
from megatron_branch.state.choose import choose_placement
from megatron_branch.state.config import StateConfig
from megatron_branch.state.placement import Placement
from megatron_branch.state.predict import Seat, StateSizes
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step before it runs.

    Attributes:
        rollouts, trees, plan: the whole step, the same on every rank.
        batch: this rank's tensors.
        order: this rank's training order.
        scoring: this rank's order of passes without backward.
        placement: where this rank keeps state.
    """

    rollouts: Sequence[Rollout]
    trees: tuple[Tree, ...]
    plan: Plan
    batch: StepBatch
    order: tuple[Action, ...]
    scoring: tuple[Action, ...]
    placement: Placement

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of this data-parallel rank."""
        return self.batch.units


@dataclass(frozen=True, eq=False)
class BranchStep:
    """What a data iterator yields, on every rank, for a step that shares prefixes."""

    planned: PlannedStep
    runtime: Runtime


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes steps for one rank.

    Attributes:
        runtime: what the passes of the rank share.
        shape: sizes of the model, for costs.
        sizes: per pipeline stage, bytes that a rank keeps per token.
        branch: gradient mode, chunks and packs.
        objective: its aggregation, advantage estimator and old log-probs are read.
        state: where state is kept.
        ulysses: size of the Ulysses groups.
        sequence_parallel: tensor-parallel ranks that share the tokens between layers.
        matched: every data-parallel rank makes the same passes (ZeRO gathers or reduces inside them).
        host_room_bytes: what this rank may take of the host's memory; None: all it needs.
    """

    runtime: Runtime
    shape: ModelShape
    sizes: Sequence[StateSizes]
    branch: BranchConfig
    objective: ObjectiveConfig
    state: StateConfig
    ulysses: int = 1
    sequence_parallel: int = 1
    matched: bool = False
    host_room_bytes: int | None = None

    def step(self, rollouts: Sequence[Rollout]) -> BranchStep:
        """A step for the data iterator (collective; see `plan`)."""
        return BranchStep(self.plan(rollouts), self.runtime)

    def plan(self, rollouts: Sequence[Rollout], *, branch: BranchConfig | None = None) -> PlannedStep:
        """Plan a step (collective: a digest of the plan is compared over all ranks).

        Args:
            rollouts: the whole step, on every rank.
            branch: instead of the planner's own.

        Raises:
            ValueError: no token is trained, or no placement fits.
            RuntimeError: ranks planned different steps.
        """
        branch, groups, device = branch or self.branch, self.runtime.groups, self.runtime.link.device
        with self.runtime.timers("tree"):
            trees = build_trees(rollouts, share=branch.gradient != "dense")
        with self.runtime.timers("plan"):
            layout = Layout(groups.dp.size, groups.cp.size, groups.pp.size, self.matched)
            retained = [stage.activations for stage in self.sizes]
            trees = gate_trees(trees, rollouts, config=branch, layout=layout, shape=self.shape, sizes=retained)
            plan = make_plan(
                trees,
                rollouts,
                config=branch,
                layout=layout,
                aggregation=self.objective.aggregation,
                shape=self.shape,
                sizes=retained,
            )
            _same_on_all_ranks(digest(plan, rollouts), device)
            batch = StepBatch(
                plan=plan,
                trees=trees,
                rollouts=rollouts,
                advantages=advantages(rollouts, estimator=self.objective.advantage),
                dp_rank=groups.dp.rank,
                cp=groups.cp.size,
                cp_rank=groups.cp.rank,
                device=device,
                ulysses=self.ulysses,
                sequence_parallel=self.sequence_parallel,
                old_logprobs=self.objective.old_logprobs,
                head_always=self.matched,
            )
            order, scoring = self._orders(plan)
            placement = choose_placement(
                self.state,
                order,
                batch.units,
                self.sizes[groups.pp.rank],
                seat=Seat(groups.cp.size, groups.cp.rank, groups.tp.rank, self.ulysses),
                host_room_bytes=self.host_room_bytes,
            )
        return PlannedStep(rollouts, trees, plan, batch, order, scoring, placement)

    def _orders(self, plan: Plan) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        groups = self.runtime.groups
        mine, stages = groups.dp.rank, groups.pp.size
        if self.matched:
            training = match_passes([depth_first(rank.units) for rank in plan.ranks])
            scoring = match_passes([scoring_orders(rank.units, 1)[0] for rank in plan.ranks])
            return training[mine], scoring[mine]
        units, stage = plan.ranks[mine].units, groups.pp.rank
        return training_orders(plan, mine, stages)[stage], scoring_orders(units, stages)[stage]


def _same_on_all_ranks(fingerprint: str, device: torch.device) -> None:
    """Raise RuntimeError on every rank unless all of them pass the same hexadecimal digest (56 bits are compared)."""
    number = int(fingerprint[:14], 16)
    low = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    if low[0].item() != -low[1].item():
        raise RuntimeError(
            "ranks planned different steps: they read different rollouts, configurations or versions; "
            "give every host the same files"
        )
