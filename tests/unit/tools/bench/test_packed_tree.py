"""The packed baseline computes the gradient that the schedule computes; otherwise comparing times means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, in_layout
from tests.tiny import write_tiny_model
from tools.bench.packed_tree import PackedStep, tree_mask

SPEC = SyntheticSpec(prefix_tokens=(9, 5), fan_out=(2, 3), tail_tokens=(7, 1, 12), vocab_size=97, seed=1)


def both(case: Case, rollouts: list[Rollout]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Gradients of the packed row and of the schedule, and the difference of their losses."""

    def compute(worker: Worker) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        step = worker.plan(rollouts)
        host = PlainHost(worker.model, worker.groups)
        with host.accumulate():
            loss = PackedStep(worker, step).run().sums.loss
        packed = {name: host.gradient(name, p).clone() for name, p in worker.model.named_parameters()}
        with host.accumulate():
            reports = worker.run(step)
        exact = {name: host.gradient(name, p).clone() for name, p in worker.model.named_parameters()}
        return packed, exact, abs(loss - sum(report.sums.loss for report in reports)).item()

    return in_layout(case, compute)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_its_gradient_is_that_of_the_schedule(tmp_path: Path, chunk_tokens: int | None) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3")
    case = Case(model, chunk_tokens=chunk_tokens)
    packed, exact, difference = run_ranks(1, both, case, list(synthetic_rollouts(SPEC)), timeout_s=60)[0]
    assert difference < 1e-13
    for name, gradient in exact.items():
        assert gradient.norm() > 0
        assert (packed[name] - gradient).norm() < 1e-12 * gradient.norm(), name


def masks(case: Case, rollouts: list[Rollout]) -> torch.Tensor:
    return in_layout(case, lambda worker: tree_mask(worker.plan(rollouts).units, torch.float32))


def test_the_mask_shows_ancestors_and_oneself_only(tmp_path: Path) -> None:
    """Two tails of 2 under a prompt of 3: its 2 inputs, then each tail's 2."""
    model = write_tiny_model(tmp_path / "model", "qwen3")
    rollouts = list(
        synthetic_rollouts(SyntheticSpec(prefix_tokens=(3,), fan_out=(2,), tail_tokens=(2,), vocab_size=97))
    )
    seen = run_ranks(1, masks, Case(model), rollouts, timeout_s=60)[0][0, 0] == 0
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0]]
    assert seen.tolist() == [[bool(x) for x in row] for row in [*expected, [1, 1, 0, 0, 1, 1]]]
