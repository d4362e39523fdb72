"""With sequence parallelism the numbers are those of dense training on one rank: tokens of a pass that tensor-parallel
ranks do not divide, passes with fewer tokens than ranks, in every kind of layout and mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from megatron_branch.engine import model as model_module
from megatron_branch.engine.gradients import Gradients
from megatron_branch.engine.groups import Groups
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute, compute_all, in_layout, worst_gradient
from tests.tiny import write_tiny_model

SCORE = (("old_logprobs", "recompute"),)
# See test_exact; a planted fault is a million times as large.
FLOAT64, VISIBLE = 1e-10, 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many KV heads as heads, so that four ranks divide them; tied embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", kv_heads=4, tied=True, seed=3)


def cases(model: Path, world: int) -> list[Case]:
    if world == 2:
        settings: list[dict[str, Any]] = [
            {"chunk_tokens": 7},
            {"chunk_tokens": 16, "pack_tokens": 1},
            {"chunk_tokens": 1, "pack_tokens": 1},
            {"gradient": "dense"},
            {"activations": "retain", "chunk_tokens": 7},
            {"gradient": "detached", "chunk_tokens": 7},
        ]
        return [Case(model, (2, 1, 1, 1), sequence_parallel=True, **one) for one in settings]
    return [
        Case(model, (4, 1, 1, 1), chunk_tokens=7, sequence_parallel=True),
        Case(model, (2, 2, 1, 1), chunk_tokens=7, pack_tokens=12, sequence_parallel=True),
        Case(model, (2, 2, 1, 1), chunk_tokens=16, ulysses=2, sequence_parallel=True),
        Case(model, (2, 1, 2, 1), chunk_tokens=7, sequence_parallel=True, objective=SCORE),
        Case(model, (2, 1, 1, 2), recompute_layers=True, sequence_parallel=True),
    ]


@pytest.fixture(scope="module")
def truths(model: Path) -> dict[tuple[bool, bool], Numbers]:
    """One rank; by whether detached, whether scored."""
    modes = [Case(model, gradient=mode) for mode in ("dense", "detached")]
    modes.append(Case(model, gradient="dense", objective=SCORE))
    numbers = run_ranks(1, compute_all, modes, odd_rollouts(97, 0))[0]
    return {(case.gradient == "detached", bool(case.objective)): n for case, n in zip(modes, numbers, strict=True)}


@pytest.mark.parametrize("world", [2, 4])
def test_numbers_are_dense(model: Path, truths: dict[tuple[bool, bool], Numbers], world: int) -> None:
    """Bytes too: a stage input of two ranks is held once, half on each."""
    mine = cases(model, world)
    by_rank = run_ranks(world, compute_all, mine, odd_rollouts(97, 0), timeout_s=300)
    for place, case in enumerate(mine):
        assert_same(case, by_rank[0][place], truths[case.gradient == "detached", bool(case.objective)], FLOAT64)
        for rank, results in enumerate(by_rank):
            assert results[place].state_bytes == results[place].predicted_bytes, f"{case}, rank {rank}"
            if case.objective:
                assert results[place].max_log_ratio < 1e-12


Fault = Callable[[], AbstractContextManager[Any]]


def no_fault() -> AbstractContextManager[Any]:
    return nullcontext()


def norms_of_own_tokens() -> AbstractContextManager[Any]:
    """Each rank keeps the gradient that its share of the tokens gives a norm."""
    original = model_module._mark

    def mark(model: Any, arch: Any, groups: Groups) -> None:
        original(model, arch, groups)
        for parameter in model.parameters():
            parameter.sequence_parallel = False

    return patch.object(model_module, "_mark", mark)


def norms_summed_twice() -> AbstractContextManager[Any]:
    original = Gradients.finish

    def finish(self: Gradients) -> None:
        original(self)
        original(self)

    return patch.object(Gradients, "finish", finish)


def head_gradient_summed_twice() -> AbstractContextManager[Any]:
    """By the head, and by the backward of the gathering before it."""
    original = model_module.gather_from_sequence_parallel_region
    return patch.object(
        model_module, "gather_from_sequence_parallel_region", lambda x, tensor_parallel_output_grad: original(x)
    )


def whole_tokens_to_the_head() -> AbstractContextManager[Any]:
    """The head reads rows of this rank's share as if they were rows of the pass."""

    def repeat(hidden: Any, tensor_parallel_output_grad: bool) -> Any:
        return hidden.repeat(2, 1, 1)

    return patch.object(model_module, "gather_from_sequence_parallel_region", repeat)


FAULTS: Sequence[Fault] = (
    norms_of_own_tokens,
    norms_summed_twice,
    head_gradient_summed_twice,
    whole_tokens_to_the_head,
)


def with_faults(case: Case, rollouts: Sequence[Rollout]) -> list[Numbers]:
    results = []
    for fault in (no_fault, *FAULTS):
        with fault():
            results.append(compute(case, rollouts))
    return results


def test_a_fault_is_seen(model: Path, truths: dict[tuple[bool, bool], Numbers]) -> None:
    case = Case(model, (2, 1, 1, 1), chunk_tokens=7, sequence_parallel=True)
    clean, *faulty = run_ranks(2, with_faults, case, odd_rollouts(97, 0), timeout_s=120)[0]
    assert_same(case, clean, truths[False, False], FLOAT64)
    for fault, numbers in zip(FAULTS, faulty, strict=True):
        assert worst_gradient(numbers, truths[False, False])[0] > VISIBLE, fault.__name__


def test_norms_are_marked(model: Path) -> None:
    assert run_ranks(2, marked, model) == [True, True]


def marked(folder: Path) -> bool:
    def check(worker: Any) -> bool:
        named = dict[str, nn.Parameter](worker.model.named_parameters())
        return {name for name, p in named.items() if p.sequence_parallel} == {n for n in named if "norm" in n}

    return in_layout(Case(folder, (2, 1, 1, 1), sequence_parallel=True), check)
