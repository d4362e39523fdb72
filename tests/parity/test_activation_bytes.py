"""Retained graphs keep the bytes of the formula until their replay and nothing after it; recomputed layers keep less.

Measured with hooks on every saved tensor: what a hook returns lives as long as the graph does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_branch.engine.forward_step import BranchForwardStep
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
from megatron_branch.schedule.runner import Runner, UnitTensors
from tests.harness import run_ranks
from tests.parity.steps import Case, in_layout
from tests.tiny import write_tiny_model

# Of the loss's own tensors, which are not in the formula: bytes per trained token and rollout. No term of the formula
# is as small in these models but the statistics of norms, of which each layer has several.
LOSS_TABLE = 40
# Two chunks without loss, then of each leaf one captured chunk whose every token is trained.
ROWS = SyntheticSpec(prefix_tokens=(65,), fan_out=(2,), tail_tokens=(64,))
CHUNK = 32


@dataclass(eq=False)
class Saved:
    """What a graph holds in place of a saved tensor."""

    tensor: Tensor


@dataclass
class Measured:
    """Of one retained unit: bytes found and predicted, and saved tensors that are left after its replay."""

    found: int
    predicted: int
    trained: bool
    left: int = -1


def storage_bytes(tensors: list[Tensor], known: set[int]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)


@contextmanager
def watched_graphs(worker: Worker) -> Iterator[dict[int, Measured]]:
    """Measures every retained unit that runs inside."""
    capture, replay = Runner._capture, Runner._replay
    results: dict[int, Measured] = {}
    alive: dict[int, weakref.WeakSet[Saved]] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in worker.model.parameters()}

    def watch(self: Runner, unit: Unit, tensors: UnitTensors, *args: Any) -> None:
        saved = alive[unit.index] = weakref.WeakSet()

        def keep(tensor: Tensor) -> Saved:
            box = Saved(tensor.detach())
            saved.add(box)
            return box

        with saved_tensors_hooks(keep, lambda box: box.tensor):
            capture(self, unit, tensors, *args)
        if not unit.retained:
            assert not saved
            return
        graph, page = self._retained[unit.index], self.store.page(unit.index)
        state = [tensor for layer in page.layers for tensor in page.state(layer)]
        ends = [tensor for tensor in (graph.stage_input, graph.output) if tensor is not None]
        # Keys and values lie in the graph's own memory, so theirs is not found a second time.
        held = storage_bytes([box.tensor for box in saved] + state + ends, parameters)
        found = held - sum(tensor.nbytes for tensor in state)
        results[unit.index] = Measured(found, self.activations.of(unit, tensors.shard.local), unit.trained)

    def check(self: Runner, unit: Unit, *args: Any) -> None:
        replay(self, unit, *args)
        if unit.retained:
            results[unit.index].left = len(alive[unit.index])

    with patch.object(Runner, "_capture", watch), patch.object(Runner, "_replay", check):
        yield results


def measured(worker: Worker) -> list[Measured]:
    step = worker.plan(synthetic_rollouts(ROWS))
    with watched_graphs(worker) as results, PlainHost(worker.model, worker.groups).accumulate():
        worker.run(step)
    assert len(results) == 4
    return [results[unit] for unit in sorted(results)]


def measure(cases: list[Case]) -> list[list[Measured]]:
    return [in_layout(case, measured) for case in cases]


@pytest.mark.parametrize("world", [1, 4])
def test_a_retained_graph_keeps_what_the_formula_says_until_its_replay(tmp_path: Path, world: int) -> None:
    sizes: dict[str, Any] = {"layers": 3, "hidden": 64, "ffn": 192, "heads": 8, "kv_heads": 2}
    qwen3 = write_tiny_model(tmp_path / "qwen3", "qwen3", head_dim=16, **sizes)
    qwen2 = write_tiny_model(tmp_path / "qwen2", "qwen2", head_dim=None, **sizes)
    cases = [Case(qwen3, dtype="bfloat16"), Case(qwen2, dtype="float32")]
    if world == 4:
        pipeline = Case(qwen2, (2, 1, 2, 1), dtype="bfloat16")
        ulysses = Case(qwen2, (1, 4, 1, 1), dtype="bfloat16", ulysses=2)
        cases = [Case(qwen3, (2, 2, 1, 1), dtype="float32"), replace(pipeline, model=qwen3, sequence_parallel=True)]
        cases += [pipeline, ulysses, replace(ulysses, model=qwen3, dtype="float32")]
    cases = [replace(case, chunk_tokens=CHUNK, activations="retain") for case in cases]
    for rank, results in enumerate(run_ranks(world, measure, cases, timeout_s=120)):
        for case, units in zip(cases, results, strict=True):
            assert {unit.trained for unit in units} == {False, True}
            for unit in units:
                allowed = LOSS_TABLE * CHUNK if unit.trained else 0
                assert 0 <= unit.found - unit.predicted <= allowed, f"{case}, rank {rank}: {unit}"
                assert unit.left == 0, f"{case}, rank {rank}: {unit.left} saved tensors outlive the replay"


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peaks(worker: Worker) -> tuple[int, int, int]:
    """Peak bytes of a step, bytes per token of a pass's graph, and forward passes."""
    step, host = worker.plan(synthetic_rollouts(ROWS)), PlainHost(worker.model, worker.groups)
    calls: list[int] = []
    original = BranchForwardStep.__call__

    def count(self: BranchForwardStep, *args: Any) -> Any:
        calls.append(1)
        return original(self, *args)

    with host.accumulate(), patch.object(BranchForwardStep, "__call__", count), LiveBytes() as live:
        worker.run(step)
    sizes = worker.sizes[0]
    return live.peak, sizes.activations.trained + sizes.kv, len(calls)


def both_ways(case: Case, change: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [in_layout(replace(case, **options), peaks) for options in ({}, change)]


@pytest.fixture
def on_one_rank(tmp_path: Path) -> Callable[[dict[str, Any]], list[tuple[int, int, int]]]:
    """Peaks without and with a change of the case."""
    model = write_tiny_model(tmp_path / "model", "llama", layers=8, hidden=64, ffn=192, heads=8, kv_heads=2)
    case = Case(model, dtype="float32", chunk_tokens=CHUNK, pack_tokens=CHUNK)
    return lambda change: run_ranks(1, both_ways, case, change)[0]


def test_recomputed_layers_lower_the_peak_of_a_pass(on_one_rank: Any) -> None:
    """Of the graph of 8 layers one layer, its gradients and 8 hidden states are left: less than 3 layers."""
    (whole, per_token, _), (layers, _, _) = on_one_rank({"recompute_layers": True})
    assert whole - layers > 5 / 8 * CHUNK * per_token


def test_a_retained_chunk_runs_forward_once(on_one_rank: Any) -> None:
    """Two chunks of the prompt and one of each of two leaves are replayed: with graphs, by no forward."""
    (_, _, again), (_, _, once) = on_one_rank({"activations": "retain"})
    assert (again, once) == (6 + 4, 6)
