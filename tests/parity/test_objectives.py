"""Each objective is the same in `exact`, `dense` and plain Hugging Face, and every setting has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.hf_reference import reference
from tests.parity.steps import Case, Numbers, assert_same, compute_all, worst_gradient
from tests.tiny import write_tiny_model

FLOAT64 = 1e-10
VISIBLE = 1e-3  # smallest relative change of some gradient that a setting must make
LAYOUTS = [(1, 2, 1, 1), (2, 1, 1, 1)]  # context parallel; vocabulary parallel
OBJECTIVES: dict[str, dict[str, Any]] = {
    "default": {},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "rloo": {"advantage": "rloo"},
    "grpo_no_std": {"advantage": "grpo_no_std"},
    "kl k1": {"kl_coefficient": 0.3, "kl_estimator": "k1"},
    "kl k2": {"kl_coefficient": 0.3, "kl_estimator": "k2"},
    "kl k3": {"kl_coefficient": 0.3},
    "clip_high": {"clip_low": 0.1, "clip_high": 0.5},
    "entropy": {"entropy_coefficient": 0.05},
    "temperature": {"temperature": 0.7},
    "current": {"old_logprobs": "current"},
    "together": {
        "aggregation": "seq-mean-token-mean",
        "advantage": "rloo",
        "kl_coefficient": 0.1,
        "kl_estimator": "k2",
        "clip_high": 0.4,
        "entropy_coefficient": 0.02,
        "temperature": 1.3,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[tuple[int, ...] | str, Numbers]]:
    """Per objective: the dense truth, and `exact` per layout."""
    rollouts = odd_rollouts(97, 0)
    settings = [tuple(sorted(objective.items())) for objective in OBJECTIVES.values()]
    dense = [Case(folder, gradient="dense", objective=objective) for objective in settings]
    truths = run_ranks(1, compute_all, dense, rollouts, timeout_s=120)[0]
    exact = [Case(folder, layout, chunk_tokens=7, objective=o) for o in settings for layout in LAYOUTS]
    computed = iter(run_ranks(2, compute_all, exact, rollouts, timeout_s=300)[0])
    return {
        name: {"dense": truth, **{layout: next(computed) for layout in LAYOUTS}}
        for name, truth in zip(OBJECTIVES, truths, strict=True)
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_exact_is_dense(results: dict[str, dict[Any, Numbers]], name: str) -> None:
    for layout in LAYOUTS:
        case = Case(Path(name), layout)
        assert_same(case, results[name][layout], results[name]["dense"], FLOAT64)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_dense_is_hugging_face(folder: Path, results: dict[str, dict[Any, Numbers]], name: str) -> None:
    plain = reference(folder, odd_rollouts(97, 0), objective=OBJECTIVES[name])
    dense = results[name]["dense"]
    assert worst_gradient(dense, Numbers(gradients=plain.gradients))[0] < FLOAT64
    assert abs(dense.loss - plain.loss) < FLOAT64


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "default"])
def test_the_setting_has_an_effect(results: dict[str, dict[Any, Numbers]], name: str) -> None:
    assert worst_gradient(results[name]["dense"], results["default"]["dense"])[0] > VISIBLE
