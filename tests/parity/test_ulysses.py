"""Ulysses, alone and inside pass-Q, gives the numbers of dense training on one rank in every layout and mode.

As in test_exact, with KV heads that divide over the ranks and KV heads that are replicated. The default samples the
product; all of it is behind the marker `slow`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute_all
from tests.tiny import write_tiny_model

HEADS, KV_HEADS = 4, (1, 2, 4)
CHUNKS = (7, 16, 64, None)
PACKS = (2048, 1, 12)
LAYOUTS = {  # (tp, cp, pp, dp) and the size of the Ulysses groups, by world size
    2: [((1, 2, 1, 1), 2)],
    4: [((1, 4, 1, 1), 4), ((1, 4, 1, 1), 2), ((2, 2, 1, 1), 2), ((1, 2, 2, 1), 2), ((1, 2, 1, 2), 2)],
    8: [((1, 8, 1, 1), 4), ((1, 8, 1, 1), 2), ((1, 4, 2, 1), 2)],
}
SCORE = (("old_logprobs", "recompute"),)
# See test_exact.
FLOAT64, FLOAT32 = 1e-10, 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two layers, by number of KV heads; well-conditioned ones as in test_exact."""
    folder = tmp_path_factory.mktemp("models")
    return {n: write_tiny_model(folder / f"kv{n}", "qwen3", heads=HEADS, kv_heads=n, seed=3) for n in KV_HEADS}


def everything(models: dict[int, Path], world: int) -> list[Case]:
    """Every layout with every number of KV heads, every mode and every chunk size; the packs in turn."""
    cases = []
    for layout, size in LAYOUTS[world]:
        for model in (models[n] for n in KV_HEADS if n % layout[0] == 0):
            cases.append(Case(model, layout, "dense", ulysses=size))
            for turn, (mode, chunk) in enumerate(product(("exact", "detached"), CHUNKS)):
                pack = PACKS[(turn + len(cases)) % len(PACKS)]
                cases.append(Case(model, layout, mode, chunk, pack, ulysses=size))
    return cases


def sample(models: dict[int, Path], world: int) -> list[Case]:
    """Each layout exact, context parallelism alone twice; some in another mode; KV heads, chunks and packs in turn."""
    cases = []
    for place, (layout, size) in enumerate(LAYOUTS[world]):
        fitting = [models[n] for n in KV_HEADS if n % layout[0] == 0]
        for turn in range(2 if layout[1] == world < 8 else 1):
            model = fitting[(place + turn) % len(fitting)]
            chunk, pack = CHUNKS[(place + 2 * turn) % 4], PACKS[(2 * place + turn) % 3]
            cases.append(Case(model, layout, chunk_tokens=chunk, pack_tokens=pack, ulysses=size))
        if place < 2 and world < 8:
            cases.append(Case(fitting[0], layout, ("dense", "detached")[place % 2], 7, ulysses=size))
    if world == 4:
        kept: dict[str, Any] = {"activations": "retain", "chunk_tokens": 7}
        cases.append(Case(models[2], (1, 4, 1, 1), ulysses=4, **kept))
        cases.append(Case(models[4], (1, 2, 2, 1), ulysses=2, recompute_layers=True, **kept))
        cases.append(Case(models[2], (1, 4, 1, 1), chunk_tokens=7, ulysses=4, objective=SCORE))
        cases.append(Case(models[1], (1, 4, 1, 1), chunk_tokens=16, ulysses=2, dtype="float32"))
    return cases


@pytest.fixture(scope="module")
def truths(models: dict[int, Path]) -> dict[tuple[Path, bool, bool], Numbers]:
    """One rank, float64; by model, whether detached, whether scored."""
    cases = [Case(model, gradient=mode) for model in models.values() for mode in ("dense", "detached")]
    cases.append(Case(models[2], gradient="dense", objective=SCORE))
    numbers = run_ranks(1, compute_all, cases, odd_rollouts(97, 0), timeout_s=120)[0]
    return {key(case): result for case, result in zip(cases, numbers, strict=True)}


def key(case: Case) -> tuple[Path, bool, bool]:
    return case.model, case.gradient == "detached", bool(case.objective)


def check(cases: list[Case], truths: dict[tuple[Path, bool, bool], Numbers], *, timeout_s: float) -> None:
    """Run the cases in one world; numbers against the truth, bytes of state against their prediction on every rank."""
    by_rank = run_ranks(cases[0].world, compute_all, cases, odd_rollouts(97, 0), timeout_s=timeout_s)
    for place, case in enumerate(cases):
        assert_same(case, by_rank[0][place], truths[key(case)], FLOAT64 if case.dtype == "float64" else FLOAT32)
        for rank, results in enumerate(by_rank):
            assert results[place].state_bytes == results[place].predicted_bytes, f"{case}, rank {rank}"
            if case.objective:
                assert results[place].max_log_ratio < 1e-12


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_gives_the_dense_numbers(
    models: dict[int, Path], truths: dict[tuple[Path, bool, bool], Numbers], world: int
) -> None:
    check(sample(models, world), truths, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_full_product(models: dict[int, Path], truths: dict[tuple[Path, bool, bool], Numbers], world: int) -> None:
    check(everything(models, world), truths, timeout_s=7200)


def test_state_is_divided_or_replicated(models: dict[int, Path]) -> None:
    """Over 4 ranks 4 KV heads leave each rank as much as pass-Q does, 1 KV head four times that, in sum."""
    cases = [Case(models[kv_heads], (1, 4, 1, 1), ulysses=size) for kv_heads in (1, 4) for size in (1, 2, 4)]
    by_rank = run_ranks(4, compute_all, cases, odd_rollouts(97, 0), timeout_s=120)
    sums = [sum(rank[place].state_bytes["state"] for rank in by_rank) for place in range(len(cases))]
    assert [total / sums[0] for total in sums] == [1, 2, 4, 4, 4, 4]
