"""On policy the ratio is 1: a scoring pass is made of the same passes as training."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from megatron_branch.engine.dump import dump_step
from megatron_branch.rollouts.synthetic import odd_rollouts, write_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, compute_all, worst_gradient
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout

LAYOUTS = {1: [(1, 1, 1, 1)], 2: [(1, 2, 1, 1), (1, 1, 2, 1)], 4: [(2, 1, 2, 1)]}
RECOMPUTE = (("old_logprobs", "recompute"),)
CURRENT = (("old_logprobs", "current"),)
# The promise in float32. The same kernels on the same shapes leave nothing at all, but for sums over ranks.
LIMIT = {"float32": 1e-6, "float64": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", layers=2)


def compute_and_dump(cases: list[Case], rollouts: Path, out: Path) -> list[Numbers]:
    """The cases, and a dump of the first."""
    case = cases[0]
    config = case.config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"rollouts": rollouts})})
    dump_step(config, str(out), False)
    leave_layout()
    return compute_all(cases, odd_rollouts(97, 0))


@pytest.mark.parametrize("world", LAYOUTS)
def test_recomputed_old_logprobs_are_the_current_ones(folder: Path, tmp_path: Path, world: int) -> None:
    kinds = product(LAYOUTS[world], ("float32", "float64"), ("exact", "dense"), (RECOMPUTE,))
    cases = [Case(folder, lay, mode, 7, dtype=dtype, objective=how) for lay, dtype, mode, how in kinds]
    cases += [Case(folder, LAYOUTS[world][0], chunk_tokens=7, objective=how) for how in (CURRENT, ())]
    write_rollouts(tmp_path / "rollouts.jsonl", odd_rollouts(97, 0))
    out = tmp_path / "dump.safetensors"
    *results, current, file = run_ranks(
        world, compute_and_dump, cases, tmp_path / "rollouts.jsonl", out, timeout_s=120
    )[0]
    for case, numbers in zip(cases, results, strict=False):
        assert numbers.max_log_ratio < LIMIT[case.dtype], case
    dumped = json.loads(out.with_name("dump.safetensors.json").read_text())
    assert dumped["max_abs_log_ratio"] < LIMIT["float32"]
    # The file's own log-probs are another policy's, and scored ones do what the current ones do.
    assert file.max_log_ratio > 0.1 and worst_gradient(file, current)[0] > 1e-3
    float64 = results[[case.dtype for case in cases].index("float64")]
    assert worst_gradient(float64, current)[0] < 1e-10
