"""Every placement gives the bits of the device, in every kind of layout; its bytes are those predicted, by kind and by
place; nothing of it is left on the disk, also after an error in the middle of a step.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from megatron_branch.schedule.runner import Runner
from megatron_branch.state.placement import Placement
from megatron_branch.state.store import StateStore
from tests.delayed import DelayedCopies
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute, in_layout, one_step
from tests.tiny import write_tiny_model

Layout = tuple[int, int, int, int]
LAYOUTS: dict[int, list[Layout]] = {
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(2, 1, 2, 1)],  # stage inputs are held by two tensor-parallel ranks
}
# Of what the fullest rank takes with everything on the device; two layers of four fit.
BUDGET = 0.95
# See `test_exact`. It is for what all placements share: the gathering of stage inputs.
FLOAT64 = 1e-10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=4)


def every_placement(case: Case, rollouts: Sequence[Rollout], files: Path) -> dict[str, Numbers]:
    """The step with each placement, in the current world."""
    numbers = {"device": compute(case, rollouts)}
    fullest = torch.tensor(numbers["device"].state_bytes["device"])
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    ways = {
        "host": {"placement": "host"},
        "nvme": {"placement": "nvme", "nvme_path": str(files)},
        "auto": {"placement": "auto", "device_budget_bytes": int(BUDGET * fullest.item())},
    }
    for name, keys in ways.items():
        numbers[name] = compute(replace(case, state=tuple(keys.items())), rollouts)
    return numbers


def every_layout(cases: Sequence[Case], rollouts: Sequence[Rollout], files: Path) -> list[dict[str, Numbers]]:
    return [every_placement(case, rollouts, files) for case in cases]


def assert_same_bits(numbers: Numbers, truth: Numbers, name: str) -> None:
    assert (numbers.loss, numbers.grad_norm, numbers.logprobs) == (truth.loss, truth.grad_norm, truth.logprobs), name
    assert numbers.gradients.keys() == truth.gradients.keys()
    for parameter, gradient in truth.gradients.items():
        assert torch.equal(numbers.gradients[parameter], gradient), (name, parameter)


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_placement_gives_the_bits_of_the_device(model: Path, tmp_path: Path, world: int) -> None:
    kinds = cycle((("float64", "exact", 7), ("bfloat16", "detached", 16)))
    cases = [
        Case(model, at, mode, chunk, dtype=dtype)
        for at, (dtype, mode, chunk) in zip(LAYOUTS[world], kinds, strict=False)
    ]
    files = tmp_path / "files"
    by_rank = run_ranks(world, every_layout, cases, odd_rollouts(97, 0), files, timeout_s=300)
    truth = run_ranks(1, compute, Case(model, gradient="dense"), odd_rollouts(97, 0))[0]
    for case, numbers in zip(cases, by_rank[0], strict=True):
        if case.gradient == "exact":
            assert_same(case, numbers["device"], truth, FLOAT64)
    for rank, results in enumerate(by_rank):
        for case, numbers in zip(cases, results, strict=True):
            for name, got in numbers.items():
                where = f"{case}, {name}, rank {rank}"
                assert_same_bits(got, numbers["device"], where)
                assert got.state_bytes == got.predicted_bytes, where
            host, nvme = numbers["host"].state_bytes, numbers["nvme"].state_bytes
            assert host["device"] == host["moving"]
            assert nvme["nvme"] >= host["host"] and nvme["host"] <= nvme["device"]
    for place in range(len(cases)):
        device, auto = (max(by[place][name].state_bytes["device"] for by in by_rank) for name in ("device", "auto"))
        assert auto <= BUDGET * device
    assert not [path for path in files.rglob("*") if path.is_file()]


def test_memory_on_the_device_is_two_layers_of_the_path(model: Path) -> None:
    """Not the whole path: with four layers half of it, and a layer of adjoints on their way out."""
    case = Case(model, chunk_tokens=7)
    device, host = run_ranks(1, _both, case, odd_rollouts(97, 0))[0]
    state, adjoint = (device.state_bytes[kind] // 4 for kind in ("state", "adjoint"))
    assert host.state_bytes["device"] <= 2 * state + 2 * adjoint < device.state_bytes["device"]


def _both(case: Case, rollouts: Sequence[Rollout]) -> list[Numbers]:
    return [compute(replace(case, state=state), rollouts) for state in ((), (("placement", "host"),))]


def late_copies(case: Case, rollouts: Sequence[Rollout], files: Path) -> tuple[list[Numbers], int]:
    """The step with copies that run as late as they may, and how many found their memory gone."""

    def both(worker: Worker) -> tuple[list[Numbers], int]:
        copies = DelayedCopies()
        results = []
        for place in ("host", "nvme"):
            worker.runtime.store = StateStore(nvme_path=files, copies=copies)
            with patch("megatron_branch.engine.planner.choose_placement", lambda *_, p=place, **__: Placement(p, p, p)):
                results.append(one_step(worker, rollouts, PlainHost(worker.model, worker.groups)))
        return results, copies.lost

    return in_layout(case, both)


def test_every_wait_is_there(model: Path, tmp_path: Path) -> None:
    case, rollouts = Case(model, (1, 1, 2, 1), chunk_tokens=7), odd_rollouts(97, 0)
    truth = run_ranks(2, compute, case, rollouts)[0]
    by_rank = run_ranks(2, late_copies, case, rollouts, tmp_path / "files")
    assert [lost for _, lost in by_rank] == [0, 0]
    for numbers in by_rank[0][0]:  # rank 0 holds the gradients of all
        assert_same_bits(numbers, truth, "late copies")


class PlantedError(Exception):
    pass


def broken_step(case: Case, rollouts: Sequence[Rollout], limit: int | None) -> tuple[str, list[str], Numbers]:
    """The message of a step that fails in the middle, the files that it leaves, and the numbers of the next step."""

    def run(worker: Worker) -> tuple[str, list[str], Numbers]:
        calls: list[int] = []
        tail = Runner._tail

        def third_fails(self: Runner, unit: Unit, *rest: object) -> None:
            calls.append(unit.index)
            if len(calls) == 3:
                raise PlantedError("in the middle")
            tail(self, unit, *rest)

        host = PlainHost(worker.model, worker.groups)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with patch.object(Runner, "_tail", Runner._tail if limit else third_fails), host.accumulate():
                worker.run(worker.plan(rollouts))
            message = ""
        except (PlantedError, OSError) as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        root = worker.config.state.nvme_path
        left = [str(path) for path in root.rglob("*") if path.is_file()] if root is not None else []
        assert set(worker.runtime.store.count.now.values()) == {0}
        return message, left, one_step(worker, rollouts, host)

    return in_layout(case, run)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_an_error_in_the_middle_leaves_nothing_and_the_next_step_is_right(
    model: Path, tmp_path: Path, place: str
) -> None:
    keys = {"placement": place} | ({"nvme_path": str(tmp_path / "files")} if place == "nvme" else {})
    case, rollouts = Case(model, chunk_tokens=7, state=tuple(keys.items())), odd_rollouts(97, 0)
    truth = run_ranks(1, compute, replace(case, state=()), rollouts)[0]
    ((message, left, numbers),) = run_ranks(1, broken_step, case, rollouts, None)
    assert message == "in the middle" and left == []
    assert_same_bits(numbers, truth, place)


def test_a_file_that_cannot_be_written_whole_is_reported_with_the_numbers(model: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    case = Case(model, chunk_tokens=7, state=(("placement", "nvme"), ("nvme_path", str(files))))
    ((message, left, numbers),) = run_ranks(1, broken_step, case, odd_rollouts(97, 0), 4096)
    assert str(files) in message and "wanted 8192 bytes, free " in message
    assert left == []
    assert_same_bits(numbers, run_ranks(1, compute, replace(case, state=()), odd_rollouts(97, 0))[0], "after")
