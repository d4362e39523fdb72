"""One rank's part of a step: plan it, score it, run it. The trainer, the tools and the benchmarks all stand on this."""

from __future__ import annotations

from collections.abc import Sequence

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
from megatron_branch.engine.planner import BranchStep, PlannedStep, Planner
from megatron_branch.engine.room import room_of_each_rank
from megatron_branch.engine.runtime import Runtime, build_link, build_store
from megatron_branch.engine.seam import get_forward_backward_func, run_branch
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.engine.transformers_host import TransformersHost, TransformersModel, build_transformers_model
from megatron_branch.engine.transformers_probe import probe
from megatron_branch.objective.logprobs import HeadSettings
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.runner import Timers

Reports = list[PassReport]


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
        kernel = select_kernel(config.attention.backend, device=device, dtype=dtype)
        self.model: BranchGPTModel | TransformersModel
        if self.arch.transformers is not None:
            self.model = build_transformers_model(self.arch, self.source.config, dtype=dtype, head=head, device=device)
        else:
            self.model = build_model(
                self.arch,
                groups,
                dtype=dtype,
                head=head,
                device=device,
                sequence_parallel=config.parallel.sequence_parallel,
            )
        load_weights(self.model, self.source, self.arch, groups)
        if isinstance(self.model, TransformersModel):
            probe(self.model, kernel, vocab=self.arch.vocab, source=str(self.source))
        self.sizes = stage_sizes(config, self.arch, device=device.type)
        self.runtime = Runtime(
            groups=groups,
            kernel=kernel,
            link=build_link(groups, dtype=dtype, device=device, hidden=self.arch.hidden),
            store=build_store(groups, config.state, device=device, sequence_parallel=config.parallel.sequence_parallel),
            timers=timers,
            activations=self.sizes[groups.pp.rank].activations,
        )
        self.host_room_bytes = room_of_each_rank(config.state)
        self.planner = Planner(
            runtime=self.runtime,
            shape=self.arch.shape(),
            sizes=self.sizes,
            branch=config.branch,
            objective=config.objective,
            state=config.state,
            ulysses=config.parallel.ulysses,
            sequence_parallel=config.parallel.sequence_ranks,
            matched=config.zero.matched(groups.dp.size),
            host_room_bytes=self.host_room_bytes,
        )

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
        return self.planner.plan(rollouts, branch=branch)

    def score(self, step: PlannedStep, *, keep: bool = True) -> Reports:
        """Log-probs of every trained token under the current weights, by the same passes as training.

        Args:
            keep: make them the old log-probs of the step.
        """
        reports = self._run(step, forward_only=True)
        if keep:
            for report in reports:
                row = torch.from_numpy(step.batch.entries(report.unit).row).to(self.device)
                step.batch.scored[report.unit] = report.logp.double()[row]
        return reports

    def run(self, step: PlannedStep) -> Reports:
        """Forward and backward of the whole step; gradients accumulate in the parameters."""
        return self._run(step, forward_only=False)

    def _run(self, step: PlannedStep, *, forward_only: bool) -> Reports:
        forward_step = BranchForwardStep(self.config.objective)
        if isinstance(self.model, TransformersModel):
            work = BranchStep(step, self.runtime)
            return run_branch(work, forward_step, TransformersHost(), self.model, forward_only=forward_only)
        longest = max((unit.tokens for unit in step.units), default=1)
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter((BranchStep(step, self.runtime),)),
            model=[self.model],
            num_microbatches=max(len(step.units), 1),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def logprobs(self, step: PlannedStep, reports: Reports) -> list[list[float]] | None:
        """Log-prob of every trained token per rollout, in token order, on global rank 0 (collective); None
        elsewhere.
        """
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for report in reports if self.groups.tp.rank == 0 else ():
            entries = step.batch.entries(report.unit)
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
