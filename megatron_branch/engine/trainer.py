"""Training: steps over a rollouts file, with metrics, checkpoints and exports."""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.config import Config
from megatron_branch.engine.checked import Checked
from megatron_branch.engine.checkpoint import export_folder, save_checkpoint
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.deepspeed_host import DeepSpeedHost
from megatron_branch.engine.dump import peak_process_bytes
from megatron_branch.engine.forward_step import total
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.hf_export import export_tensors
from megatron_branch.engine.model_config import DTYPES
from megatron_branch.engine.nonfinite import suspects
from megatron_branch.engine.optimizers import learning_rate
from megatron_branch.engine.outlook import Outlook, fullest_rank, outlook
from megatron_branch.engine.planner import PlannedStep
from megatron_branch.engine.profile import write_timeline
from megatron_branch.engine.resume import MASTERS, find_resume, identity
from megatron_branch.engine.watchdog import Watchdog
from megatron_branch.engine.worker import Reports, Worker
from megatron_branch.objective.reduce import actor_metrics, reduce_losses, rollout_metrics
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.names import action_name
from megatron_branch.tracking.console import Header
from megatron_branch.tracking.flops import StepWork, perf_metrics
from megatron_branch.tracking.metrics import PHASES
from megatron_branch.tracking.timers import Timers
from megatron_branch.tracking.tracker import Tracker, make_tracker

WRITER = 0
TIMINGS = tuple(f"timing_s/{phase}" for phase in PHASES)


class StepError(RuntimeError):
    """A step failed.

    Attributes:
        place: which step, and in which action or other part of it.
    """

    def __init__(self, place: str, cause: Exception) -> None:
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")
        self.place = place


def _place(action: Action, units: Sequence[Unit], slot: int) -> str:
    """An action as an error calls it, with the tree it belongs to."""
    tree = f"tree {units[action.unit].tree}, " if action.unit >= 0 else ""
    return f"{tree}action {action_name(action, units)} at slot {slot}"


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did.

    Attributes:
        planned: its plan.
        reports: of this rank's passes.
        lr, grad_norm: as used, before clipping; the norm of a step that was left out is NaN.
        left_out: why no weight was changed; empty if they were.
    """

    planned: PlannedStep
    reports: Reports
    lr: float
    grad_norm: float
    left_out: str = ""


def _seed(seed: int, number: int) -> None:
    """Begin every step from states that a resumed run has too."""
    mixed = (seed * 1_000_003 + number) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _event() -> torch.cuda.Event:
    """A mark in the device's work so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _event_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000.0


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
        self.resumed = find_resume(config, checked.arch)
        torch.manual_seed(config.seed)
        self.timers = Timers() if device.type == "cpu" else Timers(_event, seconds=_event_seconds)
        self.worker = Worker(config, checked, groups=groups, device=device, timers=self.timers)
        if self.resumed is not None:  # DeepSpeed copies the weights into its partitions
            self.resumed.load(self.worker.model, self.worker.arch, groups, None)
        self.host = DeepSpeedHost(
            self.worker.model,
            config,
            groups,
            store=self.worker.runtime.store,
            timers=self.timers,
            deepspeed_content=deepspeed_content,
        )
        self.worker.runtime.loss_scale = self.host.loss_scale
        self.consumed_rollouts, self.first_step = 0, 1
        if self._saves():
            parts = self.host.parts()
            if self.resumed is not None:
                self.resumed.load(self.worker.model, self.worker.arch, groups, parts)
        if self.resumed is not None:
            self.consumed_rollouts = self.resumed.state["consumed_rollouts"]
            self.first_step = self.resumed.step + 1
        self._watchdog: Watchdog | None = None
        self._stopping = False
        self._step, self._doing = "", "start"

    def _saves(self) -> bool:
        saving = self.config.checkpoint
        return saving.at_end or saving.every_steps is not None or saving.resume is not None

    def train(
        self,
        steps: Sequence[list[Rollout]],
        *,
        read_s: float = 0.0,
        left_out: str = "",
        watchdog: Watchdog | None = None,
    ) -> bool:
        """Run all optimizer steps, checkpoint and export as configured (collective).

        Args:
            steps: the rollouts of each (see `check_run`).
            read_s: seconds that reading them took, for the first row of metrics.
            left_out: what the file holds beside them, to be said once.
            watchdog: is told where this rank is, and says when to stop.

        Returns:
            Whether it was asked to stop, and did so before the last step, after a checkpoint.

        Raises:
            StepError: a step failed; it says where.
            ValueError: metrics cannot be written, or W&B is required and cannot be reached.
        """
        self._watchdog = watchdog
        if self.first_step > len(steps):
            raise ValueError(
                f"checkpoint.resume: the checkpoint is of step {self.first_step - 1}, and the run has {len(steps)}; "
                "raise steps or data.epochs"
            )
        if dist.get_rank() == WRITER and self._saves():
            _ = self._identity  # of the file as it was read
        tracking = self.config.tracking
        tracker = make_tracker(
            tracking,
            writer=dist.get_rank() == WRITER,
            steps=len(steps),
            run_config=self.config.model_dump(mode="json"),
            first_step=self.first_step,
            wandb_id=None if self.resumed is None else self.resumed.state["wandb_id"],
        )
        with tracker:
            if left_out:
                tracker.note("data", left_out)
            self._say_start(tracker)
            for number, rollouts in enumerate(steps[self.first_step - 1 :], self.first_step):
                self._step = f"step {number}/{len(steps)}"
                try:
                    self._whole_step(rollouts, tracker, number=number, total_steps=len(steps), read_s=read_s)
                except Exception as error:
                    raise StepError(f"{self._step}, {self._doing}", error) from error
                if self._stopping and number < len(steps):
                    return True
        return False

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identity(self.config, self.worker.arch)

    def _say_start(self, tracker: Tracker) -> None:
        if self.resumed is not None:
            skipped = f" (skipped: {self.resumed.skipped})" if self.resumed.skipped else ""
            tracker.note("resumed", f"{self.resumed.folder}{skipped}")
        elif self.config.checkpoint.resume is not None:
            tracker.note("resumed", "no checkpoint found, beginning at step 1")

    def _whole_step(
        self, rollouts: list[Rollout], tracker: Tracker, *, number: int, total_steps: int, read_s: float
    ) -> None:
        """Plan, run, checkpoint where due, and log the row, also when the checkpoint fails."""
        self._now("planning")
        _seed(self.config.seed, number)
        profiled = number <= self.config.tracking.profile_steps
        began = time.time()
        with self.timers("step"):
            planned = self._plan(rollouts, number, tracker)
            report = self._tracked_step(planned, number, total_steps, tracker)
        self._now("metrics")
        if profiled:
            self._write_timeline(planned, number, tracker, began=began)
        seconds = self.timers.take()
        if number == self.first_step:
            seconds["timing_s/read"] = read_s
        self.consumed_rollouts += len(rollouts)
        row = dict.fromkeys(TIMINGS, 0.0) | self._metrics(report, seconds, number)
        saved: list[Path] = []
        saving, every = self.config.checkpoint, self.config.checkpoint.every_steps
        try:
            due = every is not None and number % every == 0
            if due or (number == total_steps and saving.at_end) or (number < total_steps and self._stopping):
                self._now("checkpoint")
                with self.timers("checkpoint"):
                    saved = self.checkpoint(number, tracker.wandb_id)
        except BaseException:
            with suppress(OSError):  # what filled the disk is the checkpoint; its error is the one to read
                tracker.log(number, row | self.timers.take())
            raise
        tracker.log(number, row | self.timers.take())
        if report.left_out:
            tracker.note("skipped", f"step {number}: {report.left_out}")
        if saved:
            tracker.note("saved", ", ".join(map(str, saved)))
        if self._stopping and number < total_steps:
            tracker.note("stopped", f"by a signal, after step {number}/{total_steps}; checkpoint.resume=auto goes on")

    def step(self, planned: PlannedStep, *, number: int, total_steps: int) -> StepReport:
        """One optimizer step: score where asked, forward and backward of every tree, reduce, update."""
        if self.config.objective.old_logprobs == "recompute":
            self.worker.score(planned)
        reports: Reports | None = None
        try:
            with self.host.accumulate():
                reports = self.worker.run(planned)
        except FloatingPointError as error:
            if reports is None:
                raise
            why = f"{error}; {suspects(self.worker, planned, reports)}"
            if self.config.optimizer.on_nonfinite == "error":
                raise FloatingPointError(f"{why}; optimizer.on_nonfinite=skip goes on without such steps") from None
            lr = learning_rate(self.config.optimizer, step=number, total_steps=total_steps)
            return StepReport(planned, reports, lr, math.nan, left_out=why)
        with self.timers("optimizer"):
            lr, norm = self.host.step(number=number, total_steps=total_steps)
        return StepReport(planned, reports, lr, norm)

    def checkpoint(self, number: int, wandb_id: str | None) -> list[Path]:
        """Save the state of the run after step `number`, and export where configured (collective).

        Returns:
            the folders written.
        """
        folder = self.config.tracking.run_dir / "checkpoints"
        parts, worker = self.host.parts(), self.worker
        state = {
            "consumed_rollouts": self.consumed_rollouts,
            "updates": parts.updates(),
            "wandb_id": wandb_id,
            "identity": self._identity if dist.get_rank() == WRITER else {},
            "config": self.config.model_dump(mode="json"),
        }
        dtype = torch.float64 if self.config.model.dtype == "float64" else torch.float32

        def gather(moment: str | None) -> Iterator[tuple[str, Tensor]]:
            def one(_: str, parameter: nn.Parameter) -> Tensor:
                return parts.read(parameter, moment)

            return gather_full(worker.model, worker.arch, self.groups, one, dtype=dtype)

        kinds = ((moment or MASTERS, gather(moment)) for moment in (None, *parts.moments))
        saved = [save_checkpoint(kinds, folder, step=number, state=state, keep=self.config.checkpoint.keep)]
        if self.config.checkpoint.export_hf:
            saved.append(export_folder(saved[0]))
            self.export(saved[1])
        return saved

    def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder (collective)."""
        dtype = DTYPES[self.config.model.dtype]
        worker = self.worker
        weights = gather_full(worker.model, worker.arch, self.groups, self.host.weight, dtype=dtype)
        export_tensors(weights, worker.arch, self.groups, folder, source=worker.source, dtype=dtype)

    def _plan(self, rollouts: list[Rollout], number: int, tracker: Tracker) -> PlannedStep:
        planned = self.worker.plan(rollouts)
        if number == self.first_step:
            view = self._outlook(planned)
            fullest = fullest_rank(
                self.config,
                self.worker.arch,
                planned.plan,
                device=self.device.type,
                host_room_bytes=self.worker.host_room_bytes,
            )
            tracker.header(Header(view.topology, view.trees, fullest.count.peak, str(fullest.placement)))
            if self.config.tracking.plot_schedule and dist.get_rank() == WRITER:
                self.config.tracking.run_dir.mkdir(parents=True, exist_ok=True)
                view.picture(self.config.tracking.run_dir / "schedule.png")
        return planned

    def _tracked_step(self, planned: PlannedStep, number: int, total_steps: int, tracker: Tracker) -> StepReport:
        slots = planned.order
        if self.config.objective.old_logprobs == "recompute":
            slots = planned.scoring + slots
        places = [_place(action, planned.units, slot) for slot, action in enumerate(slots)]
        ahead = iter([*places[1:], "reduction and update"])

        def progress(action: Action) -> None:
            self._now(next(ahead))
            advance()

        self._now(places[0] if places else "reduction and update")
        with tracker.progress(number, len(slots)) as advance:
            self.worker.runtime.progress = progress
            return self.step(planned, number=number, total_steps=total_steps)

    def _now(self, doing: str) -> None:
        self._doing = doing
        if self._watchdog is not None:
            self._watchdog.at(f"{self._step}, {doing}")

    def _write_timeline(self, planned: PlannedStep, number: int, tracker: Tracker, *, began: float) -> None:
        """The step's actions as they ran (collective)."""
        view = self._outlook(planned)
        path = self.config.tracking.run_dir / "timeline" / f"step_{number}"
        drawn = view.simulation if importlib.util.find_spec("matplotlib") else None
        write_timeline(planned, self.timers, self.groups, began=began, path=path, simulated=drawn, busiest=view.busiest)
        tracker.note("timeline", f"{path}.json" + ("" if drawn is None else f", {path}.png"))

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
        stop = self._watchdog is not None and self._watchdog.stop_wanted
        peaks = torch.tensor(
            [self.worker.runtime.store.count.peak_total, self._peak_bytes(), stop], dtype=torch.float64
        ).to(self.device)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        state_peak, memory_peak, stop_anywhere = peaks.tolist()
        self._stopping = stop_anywhere > 0
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
