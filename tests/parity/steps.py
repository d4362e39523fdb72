"""One step of a tiny model in a running world, and the numbers that must not depend on how it is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_branch.config import Config, make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.dump import untimed
from megatron_branch.engine.forward_step import total
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.objective.reduce import reduce_losses
from megatron_branch.rollouts.record import Rollout


@dataclass(frozen=True)
class Case:
    """What may change without changing the numbers: layout `(tp, cp, pp, dp)`, chunks, packs, kernels."""

    layout: tuple[int, int, int, int] = (1, 1, 1, 1)
    gradient: str = "exact"
    chunk_tokens: int | None = None
    pack_tokens: int = 2048
    dtype: str = "float64"
    objective: tuple[tuple[str, Any], ...] = ()
    recompute_old: bool = False

    def config(self, model: Path) -> Config:
        """The configuration of the case."""
        objective = dict(self.objective)
        if self.recompute_old:
            objective["old_logprobs"] = "recompute"
        tp, cp, pp, dp = self.layout
        return make_config(
            {
                "model": {"path": str(model), "dtype": self.dtype},
                "data": {"rollouts": "unused"},
                "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp},
                "branch": {
                    "gradient": self.gradient,
                    "chunk_tokens": self.chunk_tokens,
                    "pack_tokens": self.pack_tokens,
                },
                "objective": objective,
                "optimizer": {"name": "sgd", "lr": 0.1, "clip_grad": 0.0},
            }
        )


@dataclass
class Numbers:
    """What a step gives, on global rank 0."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[list[float]] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    max_log_ratio: float = 0.0


def compute(case: Case, model: Path, rollouts: Sequence[Rollout]) -> Numbers:
    """Run the case on the ranks of the current world (collective); filled in on rank 0 only."""
    device = host_cpu.enter()
    tp, cp, pp, dp = case.layout
    groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp)
    try:
        config = case.config(model)
        worker = Worker(config, check_model(config), groups=groups, device=device, timers=untimed)
        host = PlainHost(worker.model, groups)
        step = worker.plan(rollouts)
        if case.recompute_old:
            worker.score(step)
        with host.accumulate():
            reports = worker.run(step)
        dtype = torch.float32 if case.dtype == "bfloat16" else getattr(torch, case.dtype)
        gradients = dict(gather_full(worker.model, worker.arch, groups, host.gradient, dtype=dtype))
        sums = reduce_losses(total(reports, device), [groups.dp_cp.group, groups.pp.group])
        logprobs = worker.logprobs(step, reports) or []
        return Numbers(gradients, logprobs, sums.loss.item(), host.grad_norm(), sums.max_log_ratio.item())
    finally:
        parallel_state.destroy_model_parallel()


def compute_all(cases: Sequence[Case], model: Path, rollouts: Sequence[Rollout]) -> list[Numbers]:
    """`compute` for each case, one world for all of them."""
    return [compute(case, model, rollouts) for case in cases]


def relative(a: Tensor, b: Tensor) -> float:
    """L2 norm of the difference over the norm of `b` (the truth)."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def worst_gradient(numbers: Numbers, truth: Numbers) -> tuple[float, str]:
    """Largest relative error over all parameters, and where."""
    assert numbers.gradients.keys() == truth.gradients.keys()
    return max((relative(numbers.gradients[name], truth.gradients[name]), name) for name in truth.gradients)


def worst_logprob(numbers: Numbers, truth: Numbers) -> float:
    """Largest absolute error over all trained tokens of all rollouts."""
    worst = 0.0
    for mine, theirs in zip(numbers.logprobs, truth.logprobs, strict=True):
        worst = max([worst, *(abs(a - b) for a, b in zip(mine, theirs, strict=True))])
    return worst


def describe(numbers: Numbers, truth: Numbers) -> str:
    """One line for a failing assertion."""
    error, name = worst_gradient(numbers, truth)
    facts = {"gradient": error, "at": name, "logprob": worst_logprob(numbers, truth), "loss": numbers.loss - truth.loss}
    return json.dumps(facts | {"norm": numbers.grad_norm - truth.grad_norm, "rank": dist.is_initialized()})
