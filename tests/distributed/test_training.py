"""Three optimizer steps through DeepSpeed leave the weights of a plain run.

The plain run: Hugging Face, dense, one process, torch's optimizer. SGD with clipping off shows every wrong scale; AdamW
with clipping far below the norm, and an epsilon of the gradients' size, shows a wrong norm. Compared are the changes of
the weights, and the gradient norm of every step on every rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_branch.config import Config, make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.deepspeed_config import with_deepspeed_file
from megatron_branch.engine.forward_step import BranchForwardStep
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.trainer import Trainer
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.hf_reference import backward, load
from tests.parity.steps import Case, Numbers, compute, relative, worst_gradient
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout

Layout = tuple[int, int, int, int]  # tp, cp, pp, dp
LAYOUTS: dict[str, Layout] = {"dp": (1, 1, 1, 2), "cp": (1, 2, 1, 1), "tp": (2, 1, 1, 1), "pp": (1, 1, 2, 1)}
# Learning rates that change every weight by some per cent to tens of per cent in three steps.
SGD = {"name": "sgd", "lr": 0.2, "clip_grad": 0.0}
# The norms are 3 to 10, so clipping always acts; clipped gradients are about 1e-3, as epsilon.
ADAMW = {"name": "adamw", "lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.3}
PARTITION_ALL = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
# float32 gradients are right to some 3e-6, and a weight of 1 that changes by 1 % keeps 6e-6 of its change when rounded.
# A wrong scale or a lost term of 1 % is 300 times the tolerance.
FLOAT32 = 3e-5
# A gradient that is rounded, reduced and rounded again is off by 2**-8 at most, a rounded weight by 2**-9.
BFLOAT16 = 2**-7
STEPS = [odd_rollouts(97, seed) for seed in range(3)]


@dataclass(frozen=True)
class Run:
    """A training run on some layout.

    Attributes:
        fail_at: forward passes into an additional first step, at which it raises; None for no such step.
        branch: further keys of that section.
    """

    name: str
    layout: Layout
    stage: int
    optimizer: dict[str, Any]
    content: dict[str, Any] = field(default_factory=dict)
    fail_at: int | None = None
    branch: dict[str, Any] = field(default_factory=dict)
    reduce: str = "step"

    def config(self, model: Path) -> Config:
        tp, cp, pp, dp = self.layout
        return make_config(
            {
                "model": {"path": str(model), "dtype": "float32"},
                "data": {"rollouts": "unused"},
                "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp},
                "branch": {"chunk_tokens": 16, "gate": False, **self.branch},
                "optimizer": self.optimizer,
                "zero": {"stage": self.stage, "reduce": self.reduce},
            }
        )


@dataclass
class Trained:
    """Weights on global rank 0, gradient norms on every rank."""

    weights: dict[str, Tensor]
    norms: list[float]


def train(run: Run, model: Path, steps: Sequence[list[Rollout]]) -> Trained:
    device = host_cpu.enter()
    tp, cp, pp, dp = run.layout
    groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp)
    config = run.config(model)
    trainer = Trainer(config, check_model(config), groups=groups, device=device, deepspeed_content=run.content)
    if run.content == PARTITION_ALL:
        assert not any(parameter.ds_persist for parameter in trainer.worker.model.parameters())
    if run.fail_at is not None:
        _fail(trainer, steps[-1], run.fail_at)
    norms = []
    for number, rollouts in enumerate(steps, 1):
        planned = trainer.worker.plan(rollouts)
        norms.append(trainer.step(planned, number=number, total_steps=len(steps)).grad_norm)
    worker, host = trainer.worker, trainer.host
    weights = dict(gather_full(worker.model, worker.arch, groups, host.weight, dtype=torch.float32))
    trainer.host.engine.destroy()
    leave_layout()
    return Trained(weights, norms)


def _fail(trainer: Trainer, rollouts: list[Rollout], at: int) -> None:
    """A step whose forward pass number `at` raises."""
    calls = 0
    original = BranchForwardStep.__call__

    def forward(self: BranchForwardStep, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise ArithmeticError("planted")
        return original(self, *args)

    planned = trainer.worker.plan(rollouts)
    with patch.object(BranchForwardStep, "__call__", forward), pytest.raises(ArithmeticError, match="planted"):
        trainer.step(planned, number=1, total_steps=1)


def bfloat16_step(run: Run, model: Path, rollouts: list[Rollout]) -> tuple[Numbers, Numbers, list[dict[str, Tensor]]]:
    """One bfloat16 step: what the plain host and DeepSpeed hold before the update, the weights before and after it."""
    exact = compute(Case(model, run.layout, chunk_tokens=16, dtype="bfloat16"), rollouts)
    tp, cp, pp, dp = run.layout
    groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp)
    config = make_config(json.loads(run.config(model).model_dump_json()), ["model.dtype=bfloat16"])
    device = host_cpu.enter()
    trainer = Trainer(config, check_model(config), groups=groups, device=device, deepspeed_content={})
    worker, host = trainer.worker, trainer.host
    whole = partial(gather_full, worker.model, worker.arch, groups, dtype=torch.float32)
    weights = [dict(whole(host.weight))]
    planned = worker.plan(rollouts)
    with host.accumulate():
        worker.run(planned)
    gradients = dict(whole(host.gradient))
    norm = host.step(number=1, total_steps=1)[1]
    weights.append(dict(whole(host.weight)))
    host.engine.destroy()
    leave_layout()
    return exact, Numbers(gradients=gradients, grad_norm=norm), weights


def bfloat16_steps(runs: Sequence[Run], model: Path, rollouts: list[Rollout]) -> list[Any]:
    return [bfloat16_step(run, model, rollouts) for run in runs]


def train_all(runs: Sequence[Run], model: Path, steps: Sequence[list[Rollout]]) -> list[Trained]:
    return [train(run, model, steps) for run in runs]


def plain(model: Path, optimizer: dict[str, Any], steps: Sequence[list[Rollout]]) -> Trained:
    """The truth, in float64."""
    hf = load(model)
    parameters = list(hf.parameters())
    make = torch.optim.SGD
    if optimizer["name"] == "adamw":
        make = partial(torch.optim.AdamW, eps=optimizer["eps"], weight_decay=optimizer["weight_decay"])
    update = make(parameters, lr=optimizer["lr"])
    norms = []
    for rollouts in steps:
        update.zero_grad()
        backward(hf, rollouts)
        clip = optimizer["clip_grad"] or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip).item())
        update.step()
    return Trained({name: p.detach() for name, p in hf.named_parameters()}, norms)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


def check(model: Path, runs: list[Run], steps: Sequence[list[Rollout]], *, timeout_s: float = 300) -> None:
    """Train all runs in one world and compare."""
    before = {name: p.detach() for name, p in load(model).named_parameters()}
    truths: dict[str, Trained] = {}
    tp, cp, pp, dp = runs[0].layout
    by_rank = run_ranks(tp * cp * pp * dp, train_all, runs, model, steps, timeout_s=timeout_s)
    for place, run in enumerate(runs):
        key = json.dumps(run.optimizer)
        if key not in truths:
            truths[key] = plain(model, run.optimizer, steps)
        truth = truths[key]
        for results in by_rank:
            for norm, true in zip(results[place].norms, truth.norms, strict=True):
                assert abs(norm / true - 1) < FLOAT32, (run, norm, true)
        weights = by_rank[0][place].weights
        assert weights.keys() == truth.weights.keys()
        for name, weight in weights.items():
            moved = truth.weights[name] - before[name]
            assert moved.norm() > 0.001 * before[name].norm(), name
            error = relative(weight.double() - before[name], moved)
            assert error < FLOAT32, f"{run}: {name}: {error}"


def runs_of(axis: str, optimizer: dict[str, Any], stages: Sequence[int]) -> list[Run]:
    return [Run(f"{axis} zero {s} {optimizer['name']}", LAYOUTS[axis], s, optimizer) for s in stages]


@pytest.mark.parametrize("axis", LAYOUTS)
def test_three_sgd_steps(model: Path, axis: str) -> None:
    runs = runs_of(axis, SGD, range(3))
    if axis == "dp":
        runs += [Run("zero 3", LAYOUTS["dp"], 3, SGD), Run("zero 3 partitioned", LAYOUTS["dp"], 3, SGD, PARTITION_ALL)]
    check(model, runs, STEPS)


@pytest.mark.parametrize("axis", LAYOUTS)
def test_three_clipped_adamw_steps(model: Path, axis: str) -> None:
    """Tensor-parallel shards count with their share, replicated weights and the tied embedding's copy once."""
    runs = runs_of(axis, ADAMW, (0, 2) if axis in ("dp", "cp") else range(3))
    if axis == "dp":
        runs.append(Run("zero 3 partitioned", LAYOUTS["dp"], 3, ADAMW, PARTITION_ALL))
    check(model, runs, STEPS)


@pytest.mark.parametrize("layout", [(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)], ids=["tp dp", "cp dp", "pp dp"])
def test_two_axes(model: Path, layout: Layout) -> None:
    runs = [Run("adamw", layout, 1, ADAMW)]
    runs.append(Run("sgd", layout, 2 if layout[2] > 1 else 3, SGD, {} if layout[2] > 1 else PARTITION_ALL))
    check(model, runs, STEPS[:2])


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_a_clipped_bfloat16_step(model: Path, axis: str) -> None:
    """At every stage DeepSpeed gets the float32 sums, and updates by them, clipped by the whole norm. They are rounded
    once with one reduction a step, and never with one a pass."""
    optimizer = {"name": "sgd", "lr": 4.0, "clip_grad": 0.5}
    runs = runs_of(axis, optimizer, range(4 if axis == "dp" else 3))
    if axis == "dp":
        runs += [replace(run, reduce="pass") for run in runs[2:]]
    by_rank = run_ranks(2, bfloat16_steps, runs, model, STEPS[0], timeout_s=120)
    for place, run in enumerate(runs):
        exact, handed, (before, after) = by_rank[0][place]
        assert worst_gradient(handed, exact)[0] < (FLOAT32 if run.reduce == "pass" else BFLOAT16), run
        for results in by_rank:
            assert abs(results[place][1].grad_norm / exact.grad_norm - 1) < BFLOAT16, run
        scale = optimizer["lr"] * optimizer["clip_grad"] / exact.grad_norm
        for name, gradient in exact.gradients.items():
            error = (after[name] - (before[name] - scale * gradient)).norm()
            assert error < BFLOAT16 / 4 * after[name].norm() + BFLOAT16 * scale * gradient.norm(), (run, name)


# Some of the chunks of 16 tokens fit.
AUTO = {"activations": "auto", "activation_budget_bytes": 60_000, "recompute_layers": True}


def test_retained_graphs_and_recomputed_layers_at_every_stage(model: Path) -> None:
    """ZeRO-3 gathers weights again for the forward that a layer runs in its backward, and for that backward."""
    layers, retain = {"recompute_layers": True}, {"activations": "retain"}
    runs = [Run("auto", LAYOUTS["dp"], 0, SGD, branch=AUTO), Run("retain", LAYOUTS["dp"], 1, ADAMW, branch=retain)]
    runs += [
        Run("retain", LAYOUTS["dp"], 2, SGD, branch=retain),
        Run("layers", LAYOUTS["dp"], 2, SGD, branch=layers, reduce="pass"),
    ]
    runs += [Run("layers", LAYOUTS["dp"], 3, SGD, content, branch=layers) for content in ({}, PARTITION_ALL)]
    check(model, runs, STEPS[:2])


def test_retained_graphs_with_zero_3_are_refused_by_name(model: Path) -> None:
    with pytest.raises(ValueError, match="zero.stage=3 with branch.activations=retain.*activations=recompute"):
        Run("retain", LAYOUTS["dp"], 3, SGD, branch={"activations": "retain"}).config(model)


def test_an_exception_in_a_tree_drops_retained_graphs(model: Path) -> None:
    runs = [Run("failing", (1, 1, 1, 1), 1, SGD, fail_at=at, branch={"activations": "retain"}) for at in (2, 9)]
    check(model, runs, STEPS[:2])


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_gradients_reduced_in_every_pass(model: Path, axis: str, optimizer: dict[str, Any]) -> None:
    """Also where a layer's forward runs again inside the backward, and, without dp, where it is a backward alone."""
    runs = [replace(run, reduce="pass") for run in runs_of(axis, optimizer, (2, 3))]
    layers, retain = {"recompute_layers": True}, {"activations": "retain"}
    if axis == "dp":
        runs.append(replace(runs[1], content=PARTITION_ALL, branch=layers))
    else:
        runs.append(replace(runs[0], branch=retain))
    check(model, runs, STEPS)


FURTHER: dict[str, Layout] = {"dp 3": (1, 1, 1, 3), "tp dp": (2, 1, 1, 2), "cp dp": (1, 2, 1, 2), "cp pp": (1, 2, 2, 1)}


@pytest.mark.parametrize("layout", FURTHER.values(), ids=FURTHER.keys())
def test_gradients_reduced_in_every_pass_of_further_layouts(model: Path, layout: Layout) -> None:
    """Partial sums of tensor-parallel ranks and of a tied embedding's two copies are completed part by part; three
    ranks divide no parameter."""
    runs = [Run("adamw", layout, 2, ADAMW, reduce="pass")]
    if layout[2] == 1:
        runs.append(Run("sgd", layout, 3, SGD, PARTITION_ALL, reduce="pass"))
    check(model, runs, STEPS[:2])


UNEVEN = {
    "one tree for two ranks": [SyntheticSpec(prefix_tokens=(9, 5), fan_out=(2, 2), tail_tokens=(7, 1, 12), seed=1)],
    "two tails against seven": [
        SyntheticSpec(prefix_tokens=(6,), fan_out=(2,), tail_tokens=(4, 9), seed=2),
        SyntheticSpec(prefix_tokens=(40,), fan_out=(7,), tail_tokens=(3, 18, 1), seed=3),
    ],
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_data_parallel_work(model: Path, name: str) -> None:
    """Ranks with less work, or none, finish; the weights are those of one rank at every stage."""
    rollouts = []
    for index, spec in enumerate(UNEVEN[name]):
        rollouts += [replace(rollout, group_id=f"group {index}") for rollout in synthetic_rollouts(spec)]
    runs = [Run(f"zero {stage}", LAYOUTS["dp"], stage, SGD) for stage in range(4)]
    runs.append(Run("zero 3 partitioned", LAYOUTS["dp"], 3, SGD, PARTITION_ALL))
    runs += [replace(run, reduce="pass") for run in runs[2:]]
    check(model, runs, [rollouts, rollouts[::-1]], timeout_s=200)


@pytest.mark.parametrize("stage", range(4))
def test_an_exception_in_a_tree_leaves_nothing_behind(model: Path, stage: int) -> None:
    """The first step raises after some passes have added gradients; the next ones are as if it had not been."""
    runs = [Run("failing", (1, 1, 1, 1), stage, SGD, fail_at=at) for at in (2, 9, 17)]
    if stage > 1:
        runs += [replace(run, reduce="pass") for run in runs]
    check(model, runs, STEPS[:2])


OVERFLOW = r"no weight was changed.*rollouts: far off \(synthetic:\d+, its logprobs are up to \d+ from the model's"


def non_finite_steps(stages: Sequence[int], model: Path, rollouts: list[Rollout]) -> list[bool]:
    """Per stage: a step with an overflowing ratio raises on this rank, or is left out, and leaves every weight as it
    was; the next step is as if it had not been.
    """
    kept = []
    for stage in stages:
        ends = []
        for refused in ([rollouts], []):
            run = Run("overflow", LAYOUTS["dp"], stage, SGD)
            groups = build_groups(dp=2, cp=1, tp=1, pp=1)
            config = run.config(model)
            trainer = Trainer(config, check_model(config), groups=groups, device=host_cpu.enter(), deepspeed_content={})
            whole = partial(gather_full, trainer.worker.model, trainer.worker.arch, groups, dtype=torch.float32)
            for step in refused:
                before = dict(whole(trainer.host.weight))
                for skip in (False, True):
                    optimizer = config.optimizer.model_copy(update={"on_nonfinite": "skip" if skip else "error"})
                    trainer.config = config.model_copy(update={"optimizer": optimizer})
                    with nullcontext() if skip else pytest.raises(FloatingPointError, match=OVERFLOW):
                        report = trainer.step(trainer.worker.plan(step), number=1, total_steps=2)
                        assert re.search(OVERFLOW, report.left_out) and math.isnan(report.grad_norm)
                    after = dict(whole(trainer.host.weight))
                    kept.append(all(torch.equal(before[name], after[name]) for name in before))
            report = trainer.step(trainer.worker.plan(STEPS[0]), number=2, total_steps=2)
            assert not report.left_out and report.grad_norm > 0
            ends.append(dict(whole(trainer.host.weight)))
            trainer.host.engine.destroy()
            leave_layout()
        kept.append(all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]))
    return kept


def test_a_gradient_that_is_not_finite_changes_no_weight(model: Path) -> None:
    """A ratio that overflows under a negative advantage is not clipped; one rank has it, both ranks say so."""
    rollouts = STEPS[0]
    bad = next(i for i, rollout in enumerate(rollouts) if rollout.trained_tokens > 3)
    far_off = np.where(rollouts[bad].loss_mask, -1e4, np.nan)
    negative = np.where(rollouts[bad].loss_mask, -1.0, 0.0)
    rollouts = [*rollouts]
    rollouts[bad] = replace(rollouts[bad], rollout_id="far off", logprobs=far_off, advantage=negative)
    assert run_ranks(2, non_finite_steps, range(4), model, rollouts, timeout_s=200) == [[True] * 12] * 2


def test_gradient_accumulation_of_deepspeed_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    """A step is one set of trees: an accumulation count would divide or would be without effect."""
    path = tmp_path / "ds.json"
    config = Run("any", LAYOUTS["dp"], 1, SGD).config(model)
    path.write_text(json.dumps({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}))
    with pytest.raises(ValueError, match=r"ds\.json: gradient_accumulation_steps = 4.*remove the key"):
        with_deepspeed_file(config, path)
    for accepted in (1, "auto"):
        content = {"gradient_accumulation_steps": accepted, "zero_optimization": {"stage": 1}}
        path.write_text(json.dumps(content))
        assert with_deepspeed_file(config, path)[1] == content
