"""One rank's part of a step: plan it, score it, run it. The trainer, the tools and the benchmarks all stand on this."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_branch.attention.backends import select_kernel
from megatron_branch.config import Config
from megatron_branch.engine.checked import Checked, check_reference
from megatron_branch.engine.convert import load_weights
from megatron_branch.engine.forward_step import BranchForwardStep, PassReport
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.model import BranchGPTModel, build_model
from megatron_branch.engine.model_config import DTYPES
from megatron_branch.engine.room import host_room
from megatron_branch.engine.runtime import BranchStep, Runtime, build_link
from megatron_branch.engine.seam import get_forward_backward_func
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.engine.step_batch import StepBatch
from megatron_branch.objective.advantages import advantages
from megatron_branch.objective.logprobs import HeadSettings
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.plan.serial import digest
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import depth_first, match_passes, scoring_orders, training_orders
from megatron_branch.schedule.runner import Timers
from megatron_branch.state.choose import choose_placement
from megatron_branch.state.partition import Replicas
from megatron_branch.state.placement import Placement
from megatron_branch.state.predict import Seat
from megatron_branch.state.store import StateStore
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree

Reports = list[tuple[int, PassReport]]


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step before it runs.

    Attributes:
        rollouts, trees, plan: the whole step, the same on every rank.
        batch: this rank's tensors.
        order: this rank's training order.
        scoring: this rank's order of a scoring pass.
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


class Worker:
    """A rank: its shard of the model and what it needs to run steps.

    Args:
        config: the run.
        checked: the model folder.
        groups: the axes.
        device: where the model lives.
        timers: phases are timed with it.
    """

    def __init__(
        self, config: Config, checked: Checked, *, groups: Groups, device: torch.device, timers: Timers
    ) -> None:
        self.config, self.arch, self.source = config, checked.arch, checked.source
        self.groups, self.device, self.timers = groups, device, timers
        dtype = DTYPES[config.model.dtype]
        head = HeadSettings(
            temperature=config.objective.temperature,
            vocab=self.arch.vocab,
            chunk_tokens=config.objective.head_chunk_tokens,
            entropy=True,
        )
        self.model: BranchGPTModel = build_model(
            self.arch,
            groups,
            dtype=dtype,
            head=head,
            device=device,
            sequence_parallel=config.parallel.sequence_parallel,
        )
        load_weights(self.model, self.source, self.arch, groups)
        self.sizes = stage_sizes(config, self.arch, device=device.type)
        self.runtime = Runtime(
            groups=groups,
            kernel=select_kernel(config.attention.backend, device=device, dtype=dtype),
            link=build_link(groups, dtype=dtype, device=device, hidden=self.arch.hidden),
            store=StateStore(
                device,
                nvme_path=config.state.nvme_path,
                replicas=None
                if config.parallel.sequence_parallel
                else Replicas(groups.tp.group, groups.tp.size, groups.tp.rank),
            ),
            timers=timers,
            activations=self.sizes[groups.pp.rank].activations,
        )
        # Only `auto` with files asks; others are checked before the run.
        self.host_room_bytes: int | None = None
        if config.state.placement == "auto" and config.state.nvme_path is not None:
            hosts: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(hosts, socket.gethostname())
            self.host_room_bytes = host_room() // hosts.count(socket.gethostname())
        self.matched = config.zero.matched(groups.dp.size)

    def plan(self, rollouts: Sequence[Rollout], *, branch: BranchConfig | None = None) -> PlannedStep:
        """Plan a step (collective: a digest of the plan is compared over all ranks).

        Args:
            rollouts: the whole step, on every rank.
            branch: instead of the configuration's section.

        Raises:
            ValueError: no token is trained, or a KL penalty lacks reference log-probs.
            RuntimeError: ranks planned different steps.
        """
        check_reference(list(rollouts), self.config)
        branch = branch or self.config.branch
        with self.timers("tree"):
            trees = build_trees(rollouts, share=branch.gradient != "dense")
        with self.timers("plan"):
            sizes = self.groups
            layout = Layout(sizes.dp.size, sizes.cp.size, sizes.pp.size, self.matched)
            shape, retained = self.arch.shape(), [stage.activations for stage in self.sizes]
            trees = gate_trees(trees, rollouts, config=branch, layout=layout, shape=shape, sizes=retained)
            plan = make_plan(
                trees,
                rollouts,
                config=branch,
                layout=layout,
                aggregation=self.config.objective.aggregation,
                shape=shape,
                sizes=retained,
            )
            _same_on_all_ranks(digest(plan, rollouts), self.device)
            batch = StepBatch(
                plan=plan,
                trees=trees,
                rollouts=rollouts,
                advantages=advantages(rollouts, estimator=self.config.objective.advantage),
                dp_rank=sizes.dp.rank,
                cp=sizes.cp.size,
                cp_rank=sizes.cp.rank,
                device=self.device,
                ulysses=self.config.parallel.ulysses,
                sequence_parallel=self.config.parallel.sequence_ranks,
                old_logprobs=self.config.objective.old_logprobs,
                head_always=self.matched,
            )
            order, scoring = self._orders(plan)
            placement = choose_placement(
                self.config.state,
                order,
                batch.units,
                self.sizes[sizes.pp.rank],
                seat=Seat(sizes.cp.size, sizes.cp.rank, sizes.tp.rank, self.config.parallel.ulysses),
                host_room_bytes=self.host_room_bytes,
            )
        return PlannedStep(rollouts, trees, plan, batch, order, scoring, placement)

    def score(self, step: PlannedStep, *, keep: bool = True) -> Reports:
        """Log-probs of every trained token under the current weights, by the same passes as training.

        Args:
            keep: make them the old log-probs of the step.
        """
        reports = self._run(step, step.scoring, forward_only=True)
        if keep:
            for unit, report in reports:
                row = torch.from_numpy(step.batch.entries(unit).row).to(self.device)
                step.batch.scored[unit] = report.logp.double()[row]
        return reports

    def run(self, step: PlannedStep) -> Reports:
        """Forward and backward of the whole step; gradients accumulate in the parameters."""
        return self._run(step, step.order, forward_only=False)

    def _run(self, step: PlannedStep, order: tuple[Action, ...], *, forward_only: bool) -> Reports:
        self.runtime.store.place(step.placement)
        branch_step = BranchStep(step.batch, order, self.runtime)
        longest = max((unit.tokens for unit in step.units), default=1)
        return get_forward_backward_func()(
            forward_step_func=BranchForwardStep(self.config.objective),
            data_iterator=iter((branch_step,)),
            model=[self.model],
            num_microbatches=max(len(step.units), 1),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _orders(self, plan: Plan) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        mine, stages = self.groups.dp.rank, self.groups.pp.size
        if self.matched:
            training = match_passes([depth_first(rank.units) for rank in plan.ranks])
            scoring = match_passes([scoring_orders(rank.units, 1)[0] for rank in plan.ranks])
            return training[mine], scoring[mine]
        units, stage = plan.ranks[mine].units, self.groups.pp.rank
        return training_orders(plan, mine, stages)[stage], scoring_orders(units, stages)[stage]

    def logprobs(self, step: PlannedStep, reports: Reports) -> list[list[float]] | None:
        """Log-prob of every trained token per rollout, in token order, on global rank 0 (collective); None
        elsewhere.
        """
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for unit, report in reports if self.groups.tp.rank == 0 else ():
            entries = step.batch.entries(unit)
            parts.append((entries.rollout, entries.token, report.logp.double().cpu().numpy()[entries.row]))
        every: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] | None = None
        if dist.get_rank() == 0:
            every = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(parts, every, dst=0)
        if every is None:
            return None
        found: list[dict[int, float]] = [{} for _ in step.rollouts]
        for rank_parts in every:
            for rollout, token, value in rank_parts:
                for r, t, v in zip(rollout.tolist(), token.tolist(), value.tolist(), strict=True):
                    assert t not in found[r], f"token {t} of rollout {r} was scored twice"
                    found[r][t] = v
        return [[row[token] for token in sorted(row)] for row in found]


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
