"""Faults planted one at a time: each must break the comparison of `exact` with `dense`, by a wide margin.

Every fault replaces one function of the package for one step; the same step without it passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.engine import gradients, step_batch
from megatron_branch.engine.gradients import Gradients
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.planner import Planner
from megatron_branch.engine.step_batch import StepBatch
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from megatron_branch.schedule import runner
from megatron_branch.schedule.runner import Runner, UnitTensors
from megatron_branch.state.page import Page
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute, worst_gradient, worst_logprob
from tests.tiny import write_tiny_model

FLOAT64 = 1e-10
VISIBLE = 1e-4  # every fault is a million times the tolerance
ONE, TP, PP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1)

Fault = Callable[[], AbstractContextManager[Any]]


def no_fault() -> AbstractContextManager[Any]:
    return nullcontext()


def dropped_replays() -> AbstractContextManager[Any]:
    """Prefixes get no gradient: detached by accident."""
    return patch.object(Runner, "_replay", lambda self, unit, tensors, reports: None)


def dropped_last_replay() -> AbstractContextManager[Any]:
    """Of a single chunk, the first of its tree."""
    original = Runner._replay

    def replay(self: Runner, unit: Unit, tensors: UnitTensors, reports: list[Any]) -> None:
        if unit.context:
            original(self, unit, tensors, reports)

    return patch.object(Runner, "_replay", replay)


def replayed_twice() -> AbstractContextManager[Any]:
    original = Runner._replay

    def replay(self: Runner, unit: Unit, tensors: UnitTensors, reports: list[Any]) -> None:
        original(self, unit, tensors, reports)
        original(self, unit, tensors, [])

    return patch.object(Runner, "_replay", replay)


def dropped_fork_terms() -> AbstractContextManager[Any]:
    """The first target of every tail, which a fork token predicts, is not trained."""
    original = StepBatch._table

    def table(self: StepBatch, unit: int, entries: Any) -> Any:
        result = original(self, unit, entries)
        if unit < 0 or self.units[unit].kind != "tail" or not self.units[unit].context:
            return result
        forks = torch.from_numpy(entries.token == self.units[unit].segments[0].start + 1)
        return dataclasses.replace(result, weight_E=result.weight_E.masked_fill(forks, 0.0))

    return patch.object(StepBatch, "_table", table)


def one_scaled_weight() -> AbstractContextManager[Any]:
    """That of a single rollout of the step, by 1 %."""
    original = StepBatch._table

    def table(self: StepBatch, unit: int, entries: Any) -> Any:
        result = original(self, unit, entries)
        scale = torch.from_numpy(1 + 0.01 * (entries.rollout == 0))
        return dataclasses.replace(result, weight_E=result.weight_E * scale)

    return patch.object(StepBatch, "_table", table)


def doubled_adjoint() -> AbstractContextManager[Any]:
    """The keys' and values' gradient of one reader in one layer."""
    original, calls = Page.add_adjoint, []

    def add(self: Page, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        calls.append(layer)
        original(self, layer, dk_PGD, dv_PGD)
        if len(calls) == 7:
            original(self, layer, dk_PGD, dv_PGD)

    return patch.object(Page, "add_adjoint", add)


def dropped_value_adjoint() -> AbstractContextManager[Any]:
    original = Page.add_adjoint

    def add(self: Page, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        original(self, layer, dk_PGD, torch.zeros_like(dv_PGD) if layer == 1 else dv_PGD)

    return patch.object(Page, "add_adjoint", add)


def detached_middle_node() -> AbstractContextManager[Any]:
    """Chunks that have ancestors are replayed without what their readers left in their adjoints."""
    seeds, original = runner._state_seeds, Runner._backward

    def none(*args: Any) -> Any:
        ends, values = seeds(*args)
        return ends, [torch.zeros_like(seed) for seed in values]

    def backward(self: Runner, unit: Unit, *args: Any) -> None:
        with patch.object(runner, "_state_seeds", none) if unit.context else nullcontext():
            original(self, unit, *args)

    return patch.object(Runner, "_backward", backward)


def tail_local_positions() -> AbstractContextManager[Any]:
    """Positions of tails start at 0."""
    original = step_batch.unit_inputs

    def inputs(unit: Unit, trees: Any, rollouts: Sequence[Rollout]) -> Any:
        ids, positions = original(unit, trees, rollouts)
        return ids, positions - unit.context_tokens if unit.kind == "tail" else positions

    return patch.object(step_batch, "unit_inputs", inputs)


def late_positions() -> AbstractContextManager[Any]:
    """Positions of tails are one too high, which rotary embeddings show only against the prefix."""
    original = step_batch.unit_inputs

    def inputs(unit: Unit, trees: Any, rollouts: Sequence[Rollout]) -> Any:
        ids, positions = original(unit, trees, rollouts)
        return ids, positions + 1 if unit.kind == "tail" else positions

    return patch.object(step_batch, "unit_inputs", inputs)


def missing_page() -> AbstractContextManager[Any]:
    """Passes that read several pages do not see the last one."""
    return _context(lambda pages: pages[:-1] if len(pages) > 1 else pages)


def page_read_twice() -> AbstractContextManager[Any]:
    """Passes that read several pages see the first one twice."""
    return _context(lambda pages: (*pages, pages[0]) if len(pages) > 1 else pages)


@contextmanager
def _context(change: Callable[[tuple[Page, ...]], tuple[Page, ...]]) -> Iterator[None]:
    original = Runner._describe

    def describe(self: Runner, unit: Unit | None, tensors: UnitTensors | None, **options: Any) -> PassDescriptor:
        descriptor = original(self, unit, tensors, **options)
        descriptor.context = change(descriptor.context)
        return descriptor

    with patch.object(Runner, "_describe", describe):
        yield


def replays_in_order_of_capture() -> AbstractContextManager[Any]:
    """A node's chunks are replayed first chunk first, before all its readers have run."""
    original = Planner._orders

    def orders(self: Planner, plan: Any) -> Any:
        training, scoring = original(self, plan)
        units = plan.ranks[self.runtime.groups.dp.rank].units
        order = list(training)
        places = [i for i, action in enumerate(order) if action.kind == "replay"]
        for first, second in zip(places, places[1:], strict=False):
            one, two = units[order[first].unit], units[order[second].unit]
            if second == first + 1 and one.segments[0].node == two.segments[0].node and one.tree == two.tree:
                order[first], order[second] = order[second], order[first]
                break
        return tuple(order), scoring

    return patch.object(Planner, "_orders", orders)


def unsummed_head_norms() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank keeps the gradient of its own heads' norms."""
    return patch.object(gradients, "PARTIAL_OVER_TP", ())


def unsummed_tied_embedding() -> AbstractContextManager[Any]:
    """The first stage's embedding misses what the head on the last stage found."""
    original = Gradients.__init__

    def init(self: Gradients, model: Any, groups: Groups) -> None:
        original(self, model, dataclasses.replace(groups, embedding=None))

    return patch.object(Gradients, "__init__", init)


def stale_stage_input() -> AbstractContextManager[Any]:
    """A stage replays every chunk from the input of the chunk before."""
    original, last = Page.keep_input, []

    def keep(self: Page, hidden: Tensor) -> None:
        same = [kept for kept in last if kept.shape == hidden.shape]
        original(self, same[-1] if same else hidden)
        last.append(hidden)

    return patch.object(Page, "keep_input", keep)


def dropped_loss_of_retained_chunks() -> AbstractContextManager[Any]:
    """It is reported at the capture and never goes backward."""
    original = Runner._forward

    def forward(self: Runner, *args: Any) -> Any:
        graph, output = original(self, *args)
        return dataclasses.replace(graph, loss=None), output

    return patch.object(Runner, "_forward", forward)


def doubled_root_seeds() -> AbstractContextManager[Any]:
    """The adjoint enters at each layer's keys and values twice."""
    original = runner._state_seeds

    def seeds(*args: Any) -> Any:
        ends, values = original(*args)
        return ends * 2, values * 2

    return patch.object(runner, "_state_seeds", seeds)


def early_seeds() -> AbstractContextManager[Any]:
    """Chunks with loss go backward with the adjoint of the time of their capture: none."""
    original = Runner._backward

    def none(*args: Any) -> Any:
        return [], []

    def backward(self: Runner, unit: Unit, *args: Any) -> None:
        with patch.object(runner, "_state_seeds", none) if unit.trained else nullcontext():
            original(self, unit, *args)

    return patch.object(Runner, "_backward", backward)


def lost_gradient_of_the_next_stage() -> AbstractContextManager[Any]:
    """Received for the order of messages, and not used."""
    original = Runner._backward

    def backward(self: Runner, unit: Unit, tensors: UnitTensors, page: Page, graph: Any) -> None:
        if graph.output is not None:
            self.link.receive_backward(unit.index, tensors.rows)
            graph.output = None
        original(self, unit, tensors, page, graph)
        if graph.stage_input is not None and graph.stage_input.grad is None:
            self.link.send_backward(unit.index, torch.zeros_like(graph.stage_input))

    return patch.object(Runner, "_backward", backward)


# Planted into steps that retain every chunk.
RETAINED_FAULTS: dict[Fault, tuple[int, int, int, int]] = {
    dropped_loss_of_retained_chunks: ONE,
    doubled_root_seeds: ONE,
    early_seeds: ONE,
    lost_gradient_of_the_next_stage: PP,
}
FAULTS: dict[Fault, tuple[int, int, int, int]] = {
    dropped_replays: ONE,
    dropped_last_replay: ONE,
    replayed_twice: ONE,
    dropped_fork_terms: ONE,
    one_scaled_weight: ONE,
    doubled_adjoint: ONE,
    dropped_value_adjoint: ONE,
    detached_middle_node: ONE,
    tail_local_positions: ONE,
    late_positions: ONE,
    missing_page: ONE,
    page_read_twice: ONE,
    replays_in_order_of_capture: ONE,
    unsummed_head_norms: TP,
    unsummed_tied_embedding: PP,
    stale_stage_input: PP,
}


def with_faults(faults: Sequence[Fault], case: Case, rollouts: Sequence[Rollout]) -> list[Numbers]:
    results = []
    for fault in (no_fault, *faults):
        with fault():
            results.append(compute(case, rollouts))
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Fault, tuple[int, int, int, int]], float]:
    """The worst gradient error of the step under each fault, in one world per layout."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)
    rollouts = odd_rollouts(97, 0)
    (truth,) = run_ranks(1, with_faults, (), Case(folder, gradient="dense"), rollouts)[0]
    result = {}
    for layout in (ONE, TP, PP):
        mine = [fault for fault, where in FAULTS.items() if where == layout]
        case = Case(folder, layout, chunk_tokens=7)
        numbers = run_ranks(case.world, with_faults, mine, case, rollouts, timeout_s=120)[0]
        for fault, got in zip((no_fault, *mine), numbers, strict=True):
            result[fault, layout] = worst_gradient(got, truth)[0]
        retain = dataclasses.replace(case, activations="retain")
        mine = [fault for fault, where in RETAINED_FAULTS.items() if where == layout]
        numbers = run_ranks(case.world, with_faults, mine, retain, rollouts, timeout_s=120)[0] if mine else []
        assert all(worst_gradient(got, truth)[0] < FLOAT64 for got in numbers[:1])
        for fault, got in zip(mine, numbers[1:], strict=True):
            result[fault, layout] = worst_gradient(got, truth)[0]
    return result


@pytest.mark.parametrize("layout", [ONE, TP, PP])
def test_without_a_fault_exact_is_dense(found: dict[Any, float], layout: tuple[int, int, int, int]) -> None:
    assert found[no_fault, layout] < FLOAT64


@pytest.mark.parametrize("fault", FAULTS | RETAINED_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(found: dict[Any, float], fault: Fault) -> None:
    assert found[fault, (FAULTS | RETAINED_FAULTS)[fault]] > VISIBLE


@pytest.mark.parametrize("where", ["a", "b", "c"])
def test_a_nan_is_seen_wherever_it_is(where: str) -> None:
    truth = Numbers(
        gradients={name: torch.ones(3) for name in "abc"}, logprobs=[[0.5, 1.5, 2.5]], loss=1.0, grad_norm=3.0
    )
    broken = {name: torch.full((3,), float("nan") if name == where else 1.0) for name in "abc"}
    assert worst_gradient(dataclasses.replace(truth, gradients=broken), truth) == (float("inf"), where)
    row = [float("nan") if name == where else value for name, value in zip("abc", truth.logprobs[0], strict=True)]
    assert worst_logprob(dataclasses.replace(truth, logprobs=[row]), truth) == float("inf")
    for broken_number in ("loss", "grad_norm"):
        with pytest.raises(AssertionError):
            wrong = dataclasses.replace(truth, **{broken_number: float("nan")})
            assert_same(Case(Path("any")), wrong, truth, FLOAT64)
