"""Measured bytes of state equal their prediction on every rank; `test_exact` compares them in all its cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, compute_all
from tests.tiny import write_tiny_model

LAYOUTS = {1: [(1, 1, 1, 1)], 4: [(2, 1, 2, 1), (1, 2, 2, 1), (1, 4, 1, 1)]}


@pytest.mark.parametrize("world", LAYOUTS)
def test_prediction_to_the_byte(tmp_path: Path, world: int) -> None:
    folder = write_tiny_model(tmp_path / "qwen3", "qwen3", layers=3)
    kinds = product(LAYOUTS[world], ("exact", "detached"), (None, 7))
    cases = [Case(folder, layout, mode, chunk, dtype="bfloat16") for layout, mode, chunk in kinds]
    if world == 4:
        cases += [
            replace(Case(folder, (1, 4, 1, 1), chunk_tokens=7, dtype="bfloat16"), ulysses=size) for size in (2, 4)
        ]
    by_rank = run_ranks(world, compute_all, cases, odd_rollouts(97, 0), timeout_s=200)
    for rank, results in enumerate(by_rank):
        for case, numbers in zip(cases, results, strict=True):
            assert numbers.state_bytes == numbers.predicted_bytes, f"{case}, rank {rank}"
            assert numbers.state_bytes["state"] > 0 and numbers.state_bytes["adjoint"] > 0
    last_rank = dict(zip(cases, by_rank[-1], strict=True))
    for case, numbers in last_rank.items():
        if case.gradient == "detached":
            whole = last_rank[replace(case, gradient="exact")]
            assert numbers.state_bytes["adjoint"] < whole.state_bytes["adjoint"]
            # Constant chunks keep no stage input, and the first stage keeps none at all.
            assert (numbers.state_bytes["stage_input"] < whole.state_bytes["stage_input"]) == (case.layout[2] > 1)
