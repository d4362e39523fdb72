"""bfloat16: the error of `exact` against a float32 truth is at most twice that of plain dense bfloat16.

Same weights on all sides, rounded to bfloat16. Two readings, each of single steps:

- the whole gradient of each step, and the log-probs of each step;
- each parameter. Its error in one step is one random draw, and of a bias of 32 numbers a wide one: of dense bfloat16 it
  is on two ranks up to 2.8 times that on one. So the ratio is that of root mean squares over draws (model, rollouts).

The objective is clipped, and no token lies near a bound. At a bound the gradient jumps, and the rounding of a log-prob
decides on which side a token falls: there plain dense bfloat16 on two ranks is up to 15 times as far from the truth as
on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, compute
from tests.tiny import Family, write_tiny_model

ALLOWED = 2.0  # what issue and design promise
CLIP = (("clip_low", 0.5), ("clip_high", 0.5))
LOG_RATIOS = (-1.2, 0.0, 1.2)  # clipped below, inside, clipped above
MARGIN = 0.4  # of each of them to log(0.5) and log(1.5)
DRAWS = range(4)
LAYOUTS: dict[Family, tuple[int, int, int, int]] = {"llama": (1, 1, 2, 1), "qwen2": (1, 2, 1, 1), "qwen3": (2, 1, 1, 1)}

Job = tuple[Case, list[Rollout]]


def compute_jobs(jobs: Sequence[Job]) -> list[Numbers]:
    return [compute(case, rollouts) for case, rollouts in jobs]


def bfloat16_model(folder: Path, family: Family, seed: int) -> Path:
    write_tiny_model(folder, family, layers=4, tied=family == "llama", seed=seed)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def away_from_the_bounds(rollouts: Sequence[Rollout], logprobs: Sequence[Sequence[float]]) -> list[Rollout]:
    """Rollouts whose old log-probs put every trained token at one of `LOG_RATIOS` for these current ones."""
    result = []
    for index, (rollout, current) in enumerate(zip(rollouts, logprobs, strict=True)):
        places = np.flatnonzero(rollout.loss_mask)
        old = np.zeros(len(rollout))
        old[places] = np.array(current) - np.take(LOG_RATIOS, places + index, mode="wrap")
        result.append(replace(rollout, logprobs=old))
    return result


def gradient_errors(numbers: Numbers, truth: Numbers) -> dict[str, float]:
    """L2 relative to the truth, per parameter, and of all of them together under `all`."""
    squares = {n: (numbers.gradients[n] - g).double().square().sum().item() for n, g in truth.gradients.items()}
    sizes = {n: g.double().square().sum().item() for n, g in truth.gradients.items()}
    errors = {name: sqrt(square / sizes[name]) for name, square in squares.items()}
    return errors | {"all": sqrt(sum(squares.values()) / sum(sizes.values()))}


def logprob_differences(numbers: Numbers, truth: Numbers) -> torch.Tensor:
    mine, theirs = (torch.tensor([v for row in side.logprobs for v in row]) for side in (numbers, truth))
    return mine - theirs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_error_is_that_of_dense_bfloat16(tmp_path: Path, family: Family) -> None:
    models = [bfloat16_model(tmp_path / str(seed), family, seed) for seed in DRAWS]
    plain = [odd_rollouts(97, seed) for seed in DRAWS]
    truth_cases = [Case(model, gradient="dense", dtype="float32", objective=CLIP) for model in models]
    current = run_ranks(1, compute_jobs, list(zip(truth_cases, plain, strict=True)), timeout_s=120)[0]
    steps = [away_from_the_bounds(rows, numbers.logprobs) for rows, numbers in zip(plain, current, strict=True)]

    def run(cases: list[Case]) -> list[Numbers]:
        return run_ranks(cases[0].world, compute_jobs, list(zip(cases, steps, strict=True)), timeout_s=200)[0]

    def low(
        layout: tuple[int, int, int, int] = (1, 1, 1, 1), gradient: str = "exact", chunk: int | None = None
    ) -> list[Case]:
        return [Case(m, layout, gradient, chunk_tokens=chunk, dtype="bfloat16", objective=CLIP) for m in models]

    truth, dense = run(truth_cases), run(low(gradient="dense"))
    assert all(logprob_differences(d, t).abs().max() < MARGIN for d, t in zip(dense, truth, strict=True))
    yardstick = [gradient_errors(d, t) for d, t in zip(dense, truth, strict=True)]
    assert all(0.005 < errors["all"] < 0.3 for errors in yardstick)  # bfloat16 was really used
    for cases in (low(), low(chunk=7), low(LAYOUTS[family], chunk=16)):
        exact = run(cases)
        found = [gradient_errors(e, t) for e, t in zip(exact, truth, strict=True)]
        for case, mine, plain_errors, e, d, t in zip(cases, found, yardstick, exact, dense, truth, strict=True):
            assert mine["all"] < ALLOWED * plain_errors["all"], case
            assert logprob_differences(e, t).norm() < ALLOWED * logprob_differences(d, t).norm(), case
        ratios = {name: _root_mean_square(found, name) / _root_mean_square(yardstick, name) for name in yardstick[0]}
        worst = max(ratios, key=ratios.__getitem__)
        assert ratios[worst] < ALLOWED, f"{cases[0]}: {worst} {ratios[worst]}"


def _root_mean_square(draws: Sequence[dict[str, float]], name: str) -> float:
    return sqrt(sum(draw[name] ** 2 for draw in draws) / len(draws))


def test_the_log_ratios_keep_their_distance() -> None:
    assert min(abs(r - bound) for r in LOG_RATIOS for bound in (log(0.5), log(1.5))) > MARGIN
