"""Gradients reduced in every pass: exact, never whole but for one parameter, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from megatron_branch.engine.gradient_shards import GradientShards
from megatron_branch.engine.gradients import global_norm
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.worker import Worker
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import RankError, run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute, in_layout, one_step
from tests.tiny import write_tiny_model

FLOAT64 = 1e-10
STEP = odd_rollouts(97, 0)


class Watched(GradientShards):
    """Takes note of each reduction, and of the whole gradients that exist at that moment: when autograd has just made
    one and before it goes, so no moment has more."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        super().__init__(model, groups)
        self.names_reduced: list[str] = []
        self.most_whole_bytes = 0

    def _reduce(self, name: str, parameter: nn.Parameter) -> None:
        whole = sum(p.grad.nbytes for p in self._parameters.values() if p.grad is not None)
        self.most_whole_bytes = max(self.most_whole_bytes, whole)
        self.names_reduced.append(name)
        super()._reduce(name, parameter)


class ShardHost:
    """The plain host with reduction in every pass."""

    loss_scale = 1.0

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        self._model, self._groups, self.shards = model, groups, Watched(model, groups)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.shards.start()
        yield
        self.shards.finish()

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        return self.shards.whole(name)

    def grad_norm(self) -> float:
        return global_norm(self._model, self._groups, self.gradient)


@dataclass
class Seen:
    """A step of one rank.

    Attributes:
        passes: kind of each action, and the parameters reduced in it, in order.
        part_bytes, most_whole_bytes: of the parts; of whole gradients at one time.
        elements: of each parameter of this rank.
    """

    numbers: Numbers = field(default_factory=Numbers)
    passes: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    part_bytes: int = 0
    most_whole_bytes: int = 0
    elements: dict[str, int] = field(default_factory=dict)


def watched_step(worker: Worker, rollouts: Sequence[Rollout]) -> Seen:
    worker.planner = replace(worker.planner, matched=worker.groups.dp.size > 1)  # see `ZeroConfig.matched`
    host = ShardHost(worker.model, worker.groups)
    seen = Seen(elements={name: p.numel() for name, p in worker.model.named_parameters()})

    def after(action: Any) -> None:
        seen.passes.append((action.kind, tuple(host.shards.names_reduced)))
        host.shards.names_reduced.clear()

    worker.runtime.progress = after
    seen.numbers = one_step(worker, rollouts, host)  # type: ignore[arg-type]
    seen.part_bytes = sum(host.shards.part(name).nbytes for name in host.shards.names())
    seen.most_whole_bytes = host.shards.most_whole_bytes
    return seen


def steps_of_all(cases: Sequence[Case], rollouts: Sequence[Rollout]) -> list[Seen]:
    return [in_layout(case, lambda worker: watched_step(worker, rollouts)) for case in cases]


def dense_step(model: Path, rollouts: Sequence[Rollout]) -> Numbers:
    """The truth: one rank, every rollout alone, one reduction."""
    return run_ranks(1, compute, Case(model, gradient="dense"), rollouts)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def dense(model: Path) -> Numbers:
    return dense_step(model, STEP)


def cases_of(name: str, model: Path) -> list[Case]:
    case = Case(model, chunk_tokens=16)
    if name == "dp":
        return [replace(case, layout=(1, 1, 1, 2)), replace(case, layout=(1, 1, 1, 2), recompute_layers=True)]
    if name == "cp":
        split = replace(case, layout=(1, 2, 1, 1))
        return [split, replace(split, ulysses=2), replace(split, activations="retain")]
    if name == "tp dp":
        return [replace(case, layout=(2, 1, 1, 2)), replace(case, layout=(2, 1, 1, 2), sequence_parallel=True)]
    return [replace(case, layout=(1, 2, 2, 1))]


@pytest.mark.parametrize("name", ["dp", "cp", "tp dp", "cp pp"])
def test_a_step_is_the_dense_one(model: Path, dense: Numbers, name: str) -> None:
    """In float64; on every rank the same parameters in the same order in every pass, and one whole gradient at most."""
    cases = cases_of(name, model)
    by_rank = run_ranks(cases[0].world, steps_of_all, cases, STEP, timeout_s=200)
    for place, case in enumerate(cases):
        assert_same(case, by_rank[0][place].numbers, dense, FLOAT64)
        tp, cp, _, dp = case.layout
        every = [results[place] for results in by_rank]
        for seen in every:
            assert seen.part_bytes == sum(8 * -(-count // (cp * dp)) for count in seen.elements.values())
            assert seen.most_whole_bytes == 8 * max(seen.elements.values())
        for stage in range(case.layout[2]):  # ranks of a stage are consecutive
            peers = every[stage * tp * cp * dp :][: tp * cp * dp]
            assert all([names for _, names in s.passes] == [names for _, names in peers[0].passes] for s in peers)
            assert any(names for _, names in peers[0].passes)


def test_a_rank_without_work_reduces_the_same_parameters(model: Path) -> None:
    """One tree for three ranks, which divide no parameter: two of them make idle passes alone."""
    one = [rollout for rollout in STEP if rollout.group_id == STEP[0].group_id]
    case = Case(model, (1, 1, 1, 3), chunk_tokens=16)
    working, idle, _ = (results[0] for results in run_ranks(3, steps_of_all, [case], one, timeout_s=120))
    assert_same(case, working.numbers, dense_step(model, one), FLOAT64)
    assert {kind for kind, _ in idle.passes} == {"idle"}
    assert [names for _, names in idle.passes] == [names for _, names in working.passes]
    backward = [names for kind, names in working.passes if kind != "capture"]
    assert all(sorted(names) == sorted(working.elements) for names in backward)


def other_order(case: Case, rollouts: Sequence[Rollout]) -> None:
    """One rank's record says something else."""

    def run(worker: Worker) -> None:
        worker.planner = replace(worker.planner, matched=True)
        host = ShardHost(worker.model, worker.groups)
        step = worker.plan(rollouts)
        with host.accumulate():
            worker.run(step)
            if worker.groups.dp.rank == 1:
                host.shards._order.update(b"another")

    in_layout(case, run)


def test_another_order_is_an_error_on_every_rank(model: Path) -> None:
    with pytest.raises(RankError, match="reduced gradients in different orders; no weight was changed"):
        run_ranks(2, other_order, Case(model, (1, 1, 1, 2)), STEP, timeout_s=120)
