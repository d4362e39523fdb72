"""Retained graphs and recomputed layers change no number, keep the bytes that are predicted, and are let go in time.

The same comparison as `test_exact`, for every layout with `retain`, and with `auto` under a budget that retains some
chunks and not others while the passes beside recompute their layers; up to two ranks also with layers recomputed alone,
exact and detached in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute_all
from tests.tiny import Family, write_tiny_model

FLOAT64 = 1e-10  # as in test_exact
LAYOUTS = {  # (tp, cp, pp, dp) by world size
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(1, 1, 4, 1), (2, 2, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1)],
    8: [(1, 2, 2, 2), (2, 2, 2, 1)],
}
WORLDS = [pytest.param(world, id=f"world{world}", marks=[pytest.mark.slow] * (world == 8)) for world in LAYOUTS]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
CHUNKS = (7, 16, 64, None)
# Of the chunks of 7 to 64 tokens of these models some fit and some do not, on every layout.
BUDGET = 200_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {f: write_tiny_model(folder / f, f, layers=4, tied=f == "llama", seed=3) for f in FAMILIES}


def truth_of(case: Case) -> Case:
    """On one rank: dense for exact; detached with recomputation, in other chunks, for detached."""
    mode = "dense" if case.gradient == "exact" else case.gradient
    return Case(case.model, gradient=mode, objective=case.objective)


@pytest.fixture(scope="module")
def truths(models: dict[Family, Path]) -> dict[Case, Numbers]:
    layouts = [layouts for world, layouts in LAYOUTS.items() if world < 8]  # those of 8 ranks need no others
    cases = list({truth_of(case): None for some in layouts for case in covering(models, some)})
    return dict(zip(cases, run_ranks(1, compute_all, cases, odd_rollouts(97, 0))[0], strict=True))


def covering(models: dict[Family, Path], layouts: list[tuple[int, int, int, int]]) -> Iterator[Case]:
    """Every layout with each mode; families, chunk sizes and gradient modes in turn."""
    for place, layout in enumerate(layouts):
        family = [models[FAMILIES[(place + turn) % len(FAMILIES)]] for turn in range(3)]
        chunk = [CHUNKS[(place + turn) % len(CHUNKS)] for turn in range(3)]
        yield Case(family[0], layout, chunk_tokens=chunk[0], activations="retain")
        auto = Case(family[1], layout, chunk_tokens=7, activations="auto", budget_bytes=BUDGET, pack_tokens=12)
        yield replace(auto, recompute_layers=True)
        if auto.world <= 2:
            layers = Case(family[2], layout, chunk_tokens=chunk[2], recompute_layers=True)
            yield replace(layers, gradient="exact" if place % 2 else "detached")
        if auto.world == 1:
            yield replace(auto, gradient="detached", objective=(("old_logprobs", "recompute"),))
            yield Case(family[2], layout, gradient="detached", activations="retain", chunk_tokens=16)


def check(cases: list[Case], truths: dict[Case, Numbers], *, timeout_s: float) -> None:
    """Numbers against the truth; bytes against their prediction, on every rank."""
    by_rank = run_ranks(cases[0].world, compute_all, cases, odd_rollouts(97, 0), timeout_s=timeout_s)
    for place, case in enumerate(cases):
        mine = by_rank[0][place]
        assert_same(case, mine, truths[truth_of(case)], FLOAT64)
        for rank, results in enumerate(by_rank):
            assert results[place].state_bytes == results[place].predicted_bytes, f"{case}, rank {rank}"
        retained, replays = mine.retained, mine.replays
        wanted = {"recompute": retained == 0, "retain": retained == replays, "auto": 0 < retained < replays}
        assert wanted[case.activations], f"{case}: {retained} of {replays} chunks retained"
        assert (mine.state_bytes["activations"] > 0) == (retained > 0), case
        if case.budget_bytes is not None:
            held = [results[place].state_bytes["activations"] for results in by_rank]
            assert max(held) <= case.budget_bytes, f"{case}: {held}"


@pytest.mark.parametrize("world", WORLDS)
def test_every_way_to_keep_activations_is_the_truth(
    models: dict[Family, Path], truths: dict[Case, Numbers], world: int
) -> None:
    check(list(covering(models, LAYOUTS[world])), truths, timeout_s=300)
