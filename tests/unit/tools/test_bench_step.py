"""What benchmarks compare with: the bounds of the judged sizes, and trees of the sizes that were asked for."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tools.bench.sweep import SWEEPS
from tools.bench_step import Bench, Sizes, parse

# Dense FLOPs over executed ones: with recompute, with retain, and with recompute over dense that recomputes its layers.
BOUNDS = {(2048, 8, 128): (4.18, 4.92, 5.48), (4096, 8, 64): (5.42, 6.77, 7.06), (4096, 16, 256): (5.85, 6.50, 7.62)}


def bounds(cases: list[Sizes]) -> list[tuple[float, ...]]:
    bench = Bench(parse([]))
    modes = ("dense", "exact", "exact_retain", "dense_recompute")
    found = []
    for case in cases:
        steps = bench._plan(case, modes)
        dense, exact, retain, recompute = (steps[mode].bound for mode in modes)
        assert dense == 1.0
        found.append((exact, retain, exact / recompute))
    return found


def test_bounds_of_the_judged_sizes() -> None:
    cases = [Sizes(*sizes) for sizes in SWEEPS["speed"].cases]
    assert {case[:3] for case in cases} == BOUNDS.keys()
    for case, found in zip(cases, run_ranks(1, bounds, cases, timeout_s=60)[0], strict=True):
        assert found == pytest.approx(BOUNDS[case[:3]], abs=0.011), case  # two digits


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_nested_prompt_has_as_many_tokens_and_rollouts(depth: int) -> None:
    lengths, fan_out = Sizes(2050, 8, 128, depth).tree()
    assert sum(lengths) == 2050 and len(lengths) == len(fan_out) == depth
    leaves = 1
    for branches in fan_out:
        leaves *= branches
    assert leaves == 8
