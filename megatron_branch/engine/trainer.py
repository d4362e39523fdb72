"""Training: steps over a rollouts file, with metrics, checkpoints and exports."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_branch.config import Config
from megatron_branch.engine.checked import Checked
from megatron_branch.engine.checkpoint import save_checkpoint
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.deepspeed_host import DeepSpeedHost
from megatron_branch.engine.dump import peak_process_bytes
from megatron_branch.engine.forward_step import total
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.hf_export import export_tensors
from megatron_branch.engine.model_config import DTYPES
from megatron_branch.engine.outlook import Outlook, outlook
from megatron_branch.engine.worker import PlannedStep, Reports, Worker
from megatron_branch.objective.reduce import actor_metrics, reduce_losses, rollout_metrics
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tracking.console import Header
from megatron_branch.tracking.flops import StepWork, perf_metrics
from megatron_branch.tracking.timers import Timers
from megatron_branch.tracking.tracker import Tracker, make_tracker

WRITER = 0


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did.

    Attributes:
        planned: its plan.
        reports: of this rank's passes.
        lr, grad_norm: as used, before clipping.
    """

    planned: PlannedStep
    reports: Reports
    lr: float
    grad_norm: float


class Trainer:
    """Everything a rank trains with.

    Args:
        config: the run.
        checked: the model folder.
        groups: the axes.
        device: where the model lives.
        deepspeed_content: the user's DeepSpeed file.
    """

    def __init__(
        self,
        config: Config,
        checked: Checked,
        *,
        groups: Groups,
        device: torch.device,
        deepspeed_content: dict[str, Any],
    ) -> None:
        self.config, self.groups, self.device = config, groups, device
        torch.manual_seed(config.seed)
        sync = torch.cuda.synchronize if device.type == "cuda" else None
        self.timers = Timers(sync)
        self.worker = Worker(config, checked, groups=groups, device=device, timers=self.timers)
        self.host = DeepSpeedHost(
            self.worker.model,
            config,
            groups,
            store=self.worker.runtime.store,
            timers=self.timers,
            deepspeed_content=deepspeed_content,
        )
        self.worker.runtime.loss_scale = self.host.loss_scale
        self.consumed_rollouts = 0

    def train(self, steps: Sequence[list[Rollout]]) -> None:
        """Run all optimizer steps (see `all_steps`), checkpoint and export as configured (collective)."""
        tracking = self.config.tracking
        tracker = make_tracker(
            tracking,
            writer=dist.get_rank() == WRITER,
            steps=len(steps),
            run_config=self.config.model_dump(mode="json"),
        )
        with tracker:
            for number, rollouts in enumerate(steps, 1):
                planned = self._plan(rollouts, number, tracker)
                with self.timers("step"):
                    report = self._tracked_step(planned, number, len(steps), tracker)
                seconds = self.timers.take()
                self.consumed_rollouts += len(rollouts)
                tracker.log(number, self._metrics(report, seconds, number))
                every, last = self.config.checkpoint.every_steps, number == len(steps)
                if (every is not None and number % every == 0) or (last and self.config.checkpoint.at_end):
                    with self.timers("checkpoint"):
                        self.checkpoint(number, tracker.wandb_id)

    def step(self, planned: PlannedStep, *, number: int, total_steps: int) -> StepReport:
        """One optimizer step: score where asked, forward and backward of every tree, reduce, update."""
        if self.config.objective.old_logprobs == "recompute":
            self.worker.score(planned)
        with self.host.accumulate():
            reports = self.worker.run(planned)
        with self.timers("optimizer"):
            lr, norm = self.host.step(number=number, total_steps=total_steps)
        return StepReport(planned, reports, lr, norm)

    def checkpoint(self, number: int, wandb_id: str | None) -> None:
        """Save the state of the run after step `number`, and export where configured (collective)."""
        folder = self.config.tracking.run_dir / "checkpoints"
        state = {
            "step": number,
            "consumed_rollouts": self.consumed_rollouts,
            "wandb_id": wandb_id,
            "config": json.dumps(self.config.model_dump(mode="json")),
            "random": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        }
        saved = save_checkpoint(self.host, folder, step=number, state=state, keep=self.config.checkpoint.keep)
        if self.config.checkpoint.export_hf:
            self.export(saved.with_name(f"{saved.name}_hf"))

    def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder (collective)."""
        dtype = DTYPES[self.config.model.dtype]
        worker = self.worker
        weights = gather_full(worker.model, worker.arch, self.groups, self.host.weight, dtype=dtype)
        export_tensors(weights, worker.arch, self.groups, folder, source=worker.source, dtype=dtype)

    def _plan(self, rollouts: list[Rollout], number: int, tracker: Tracker) -> PlannedStep:
        planned = self.worker.plan(rollouts)
        if number == 1:
            view = self._outlook(planned)
            tracker.header(Header(view.topology, view.trees, view.peak_bytes))
            if self.config.tracking.plot_schedule and dist.get_rank() == WRITER:
                self.config.tracking.run_dir.mkdir(parents=True, exist_ok=True)
                view.picture(self.config.tracking.run_dir / "schedule.png")
        return planned

    def _tracked_step(self, planned: PlannedStep, number: int, total_steps: int, tracker: Tracker) -> StepReport:
        scoring = len(planned.scoring) if self.config.objective.old_logprobs == "recompute" else 0
        with tracker.progress(number, len(planned.order) + scoring) as advance:
            self.worker.runtime.progress = lambda action: advance()
            return self.step(planned, number=number, total_steps=total_steps)

    def _outlook(self, planned: PlannedStep) -> Outlook:
        return outlook(
            self.config,
            self.worker.arch,
            planned.plan,
            planned.trees,
            planned.rollouts,
            world_size=dist.get_world_size(),
            device=self.device.type,
        )

    def _metrics(self, report: StepReport, seconds: dict[str, float], number: int) -> dict[str, float]:
        """The row of a step, the same on every rank (collective)."""
        planned = report.planned
        sums = reduce_losses(total(report.reports, self.device), [self.groups.dp_cp.group, self.groups.pp.group])
        view = self._outlook(planned)
        peaks = torch.tensor([self.worker.runtime.store.count.peak_total, self._peak_bytes()], dtype=torch.float64)
        peaks = peaks.to(self.device)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        state_peak, memory_peak = peaks.tolist()
        work = StepWork(view.flops.dense, view.executed_flops, planned.plan.logical_tokens)
        time_per_step = seconds["timing_s/step"]
        return {
            **actor_metrics(sums),
            "actor/grad_norm": report.grad_norm,
            "actor/lr": report.lr,
            **rollout_metrics(planned.rollouts),
            **seconds,
            **perf_metrics(
                work,
                seconds=time_per_step,
                devices=dist.get_world_size(),
                peak_flops=self.config.tracking.peak_flops,
            ),
            "perf/max_memory_allocated_gb": memory_peak / 2**30,
            **view.metrics(),
            "branch/state_bytes_peak": state_peak,
            "training/global_step": float(number),
            "training/consumed_rollouts": float(self.consumed_rollouts),
        }

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else peak_process_bytes()
