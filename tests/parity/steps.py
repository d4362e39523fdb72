"""One step of a tiny model in a running world, and the numbers that must not depend on how it is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_branch.config import Config, make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.dump import untimed
from megatron_branch.engine.forward_step import total
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.planner import PlannedStep
from megatron_branch.engine.worker import Worker
from megatron_branch.objective.reduce import reduce_losses
from megatron_branch.rollouts.record import Rollout
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.predict import Seat, predict_state
from tests.worlds import leave_layout


@dataclass(frozen=True)
class Case:
    """What may change without changing the numbers: layout `(tp, cp, pp, dp)`, chunks, packs, precision.

    `ulysses` is the size of its groups among the cp ranks; `model` is a folder; `objective` and `state` are keys of
    those sections of the configuration.
    """

    model: Path
    layout: tuple[int, int, int, int] = (1, 1, 1, 1)
    gradient: str = "exact"
    chunk_tokens: int | None = None
    pack_tokens: int = 2048
    dtype: str = "float64"
    ulysses: int = 1
    sequence_parallel: bool = False
    activations: str = "recompute"
    budget_bytes: int | None = None
    recompute_layers: bool = False
    gate: bool = False
    host: str = "megatron"
    objective: tuple[tuple[str, Any], ...] = ()
    state: tuple[tuple[str, Any], ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        tp, cp, pp, dp = self.layout
        return tp * cp * pp * dp

    def config(self) -> Config:
        """The configuration of the case."""
        tp, cp, pp, dp = self.layout
        return make_config(
            {
                "model": {"path": str(self.model), "dtype": self.dtype, "host": self.host},
                "data": {"rollouts": "unused"},
                "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp} | self._split(),
                "branch": {
                    "gradient": self.gradient,
                    "chunk_tokens": self.chunk_tokens,
                    "pack_tokens": self.pack_tokens,
                    "gate": self.gate,
                    "activations": self.activations,
                    "activation_budget_bytes": self.budget_bytes,
                    "recompute_layers": self.recompute_layers,
                },
                "objective": dict(self.objective),
                "state": dict(self.state),
                "optimizer": {"name": "sgd", "lr": 0.1, "clip_grad": 0.0},
            }
        )

    def _split(self) -> dict[str, Any]:
        ulysses = {"cp_mode": "ulysses", "ulysses_size": self.ulysses} if self.ulysses > 1 else {}
        return ulysses | {"sequence_parallel": self.sequence_parallel}

    def __str__(self) -> str:
        layout = "tp{} cp{} pp{} dp{}".format(*self.layout) + f" ulysses {self.ulysses}"
        layout += " sequence parallel" if self.sequence_parallel else ""
        settings = [self.host, self.model.name, layout, self.gradient, self.dtype]
        settings.append(f"{self.activations} {self.budget_bytes} {'layers' if self.recompute_layers else ''}")
        return " ".join(
            [
                *settings,
                f"chunk {self.chunk_tokens}",
                f"pack {self.pack_tokens}",
                str(dict(self.objective)),
                str(dict(self.state)),
            ]
        )


@dataclass
class Numbers:
    """What a step gives: gradients and log-probs on global rank 0, the rest on every rank.

    Attributes:
        gradients: by Hugging Face name, whole.
        logprobs: per rollout, of its trained tokens.
        loss, grad_norm: of the step.
        max_log_ratio: largest |current - old log-prob|.
        state_bytes, predicted_bytes: this rank's peak by kind, by place and of their sum, measured and predicted.
        replays, retained: number of prefix units of this rank that are replayed; of those that keep their graph.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[list[float]] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    max_log_ratio: float = 0.0
    state_bytes: dict[str, int] = field(default_factory=dict)
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    retained: int = 0


def in_layout(case: Case, compute: Callable[[Worker], Any]) -> Any:
    """Call `compute` with a worker of the case on the ranks of the current world (collective)."""
    device = host_cpu.enter()
    tp, cp, pp, dp = case.layout
    groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp, ulysses=case.ulysses)
    try:
        config = case.config()
        return compute(Worker(config, check_model(config), groups=groups, device=device, timers=untimed))
    finally:
        leave_layout()


def compute(case: Case, rollouts: Sequence[Rollout]) -> Numbers:
    """Run the case on the ranks of the current world (collective)."""
    return in_layout(case, lambda worker: one_step(worker, rollouts, PlainHost(worker.model, worker.groups)))


def one_step(worker: Worker, rollouts: Sequence[Rollout], host: PlainHost) -> Numbers:
    """Plan, score where asked, run; the numbers (collective)."""
    groups, config = worker.groups, worker.config
    step = worker.plan(rollouts)
    if config.objective.old_logprobs == "recompute":
        worker.score(step)
    with host.accumulate():
        reports = worker.run(step)
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    sums = reduce_losses(total(reports, worker.device), [groups.dp_cp.group, groups.pp.group])
    return Numbers(
        gradients=dict(gather_full(worker.model, worker.arch, groups, host.gradient, dtype=dtype)),
        logprobs=worker.logprobs(step, reports) or [],
        loss=sums.loss.item(),
        grad_norm=host.grad_norm(),
        max_log_ratio=sums.max_log_ratio.item(),
        state_bytes=_peaks(worker.runtime.store.count),
        predicted_bytes=_predicted(worker, step),
        replays=sum(unit.replayed for unit in step.units),
        retained=sum(unit.retained for unit in step.units),
    )


def _predicted(worker: Worker, step: PlannedStep) -> dict[str, int]:
    groups = worker.groups
    seat = Seat(groups.cp.size, groups.cp.rank, groups.tp.rank, worker.config.parallel.ulysses)
    sizes = worker.sizes[groups.pp.rank]
    return _peaks(predict_state(step.order, step.units, sizes, seat=seat, placement=step.placement))


def _peaks(count: ByteCount) -> dict[str, int]:
    return {**count.peak, **count.peak_at, "total": count.peak_total}


def compute_all(cases: Sequence[Case], rollouts: Sequence[Rollout]) -> list[Numbers]:
    """`compute` for each case, one world for all of them."""
    return [compute(case, rollouts) for case in cases]


def relative(a: Tensor, b: Tensor) -> float:
    """L2 norm of the difference over the norm of `b` (the truth)."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def largest(values: Iterable[float]) -> float:
    """Maximum that is infinite where a value is NaN: Python's own skips NaN, and a NaN would pass every limit."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def worst_gradient(numbers: Numbers, truth: Numbers) -> tuple[float, str]:
    """Largest relative error over all parameters, and where."""
    assert numbers.gradients.keys() == truth.gradients.keys()
    return max((largest([relative(numbers.gradients[name], truth.gradients[name])]), name) for name in truth.gradients)


def worst_logprob(numbers: Numbers, truth: Numbers) -> float:
    """Largest absolute error over all trained tokens of all rollouts."""
    pairs = zip(numbers.logprobs, truth.logprobs, strict=True)
    return largest(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def errors(numbers: Numbers, truth: Numbers) -> dict[str, float]:
    """The worst error of each kind: parameters, log-probs (nats), loss, gradient norm."""
    error, _ = worst_gradient(numbers, truth)
    return {
        "gradient": error,
        "logprob": worst_logprob(numbers, truth),
        "loss": abs(numbers.loss / truth.loss - 1),
        "norm": abs(numbers.grad_norm / truth.grad_norm - 1),
    }


def describe(numbers: Numbers, truth: Numbers) -> str:
    """One line for a failing assertion."""
    return json.dumps(errors(numbers, truth) | {"at": worst_gradient(numbers, truth)[1]})


def assert_same(case: Case, numbers: Numbers, truth: Numbers, tolerance: float) -> None:
    """Every parameter, each log-prob, the loss and the norm agree to `tolerance`, and none of them is trivial."""
    assert truth.grad_norm > 0.1 and abs(truth.loss) > 1e-3 and all(g.norm() > 0 for g in truth.gradients.values())
    worst = errors(numbers, truth)
    assert largest(worst.values()) < tolerance, f"{case}: {describe(numbers, truth)}"
