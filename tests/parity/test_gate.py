"""A step in which some trees are shared and some run alone has the numbers of dense training in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute_all, in_layout
from tests.tiny import write_tiny_model

FLOAT64 = 1e-10  # see test_exact
LAYOUTS = {1: [(1, 1, 1, 1)], 2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)], 4: [(1, 2, 2, 1)]}


def mixed_rollouts() -> list[Rollout]:
    """The odd rollouts, whose trees do not pay without packing, and a group whose tree does."""
    spec = SyntheticSpec(prefix_tokens=(60,), fan_out=(6,), tail_tokens=(4, 9), seed=5, advantages=True)
    rows = odd_rollouts(97, 0)
    for row in synthetic_rollouts(spec):  # no other tree begins with this token
        ids = row.token_ids.copy()
        ids[0] = 96
        rows.append(replace(row, token_ids=ids))
    return rows


def run(cases: list[Case]) -> tuple[list[Numbers], list[int], list[int]]:
    """Numbers, and trees that ran alone and shared."""
    rows = mixed_rollouts()
    plans = [in_layout(case, lambda worker: worker.plan(rows)) for case in cases]
    shared = [sum(unit.replayed for rank in step.plan.ranks for unit in rank.units) for step in plans]
    return compute_all(cases, rows), [step.plan.dense_trees for step in plans], shared


@pytest.mark.parametrize("world", LAYOUTS)
def test_gated_steps_are_exact(tmp_path: Path, world: int) -> None:
    folder = write_tiny_model(tmp_path / "qwen3", "qwen3", layers=4, seed=3)
    (truth,) = run_ranks(1, compute_all, [Case(folder, gradient="dense")], mixed_rollouts())[0]
    cases = [Case(folder, layout, pack_tokens=1, gate=True) for layout in LAYOUTS[world]]
    numbers, dense, shared = run_ranks(world, run, cases, timeout_s=120)[0]
    for case, mine in zip(cases, numbers, strict=True):
        assert_same(case, mine, truth, FLOAT64)
    assert min(dense) > 0 and min(shared) > 0
