"""What `tools/dump_step.py` writes is what plain Hugging Face autograd computes, at every ZeRO stage too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_branch.config import Config
from megatron_branch.engine.dump import dump_step
from megatron_branch.rollouts.synthetic import odd_rollouts, write_rollouts
from tests.harness import run_ranks
from tests.parity.hf_reference import Reference, reference
from tests.parity.steps import Numbers, worst_gradient, worst_logprob
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout
from tools.dump_step import configure, parse

ROLLOUTS = odd_rollouts(97, 0)
# As in test_exact and test_hf_reference: sums in another order, in float64 and in float32.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
LAYOUTS = ("--dp 2", "--cp 2", "--tp 2", "--pp 2")
COMMANDS = list(LAYOUTS)
COMMANDS += [f"{layout} --zero {stage}" for layout in LAYOUTS for stage in range(4) if "pp" not in layout or stage < 3]
COMMANDS += ["--cp 2 --cp_mode ulysses", *(f"--cp 2 --cp_mode ulysses --zero {stage}" for stage in (1, 3))]
COMMANDS += [f"--tp 2 {zero}parallel.sequence_parallel=true" for zero in ("", "--zero 2 ", "--zero 3 ")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def truth(model: Path) -> Reference:
    return reference(model, ROLLOUTS)


@pytest.fixture(scope="module")
def dumps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    write_rollouts(folder / "rollouts.jsonl", ROLLOUTS)
    outs = {command: folder / f"{command.replace(' ', '')}.safetensors" for command in COMMANDS}
    files = ["--model", str(model), "--rollouts", str(folder / "rollouts.jsonl"), "--chunk_tokens", "16"]
    options = [parse([*files, "--out", str(out), *command.split()]) for command, out in outs.items()]
    calls = [(configure(option), option.out, option.zero is not None) for option in options]
    run_ranks(2, dump_all, calls, timeout_s=200)
    return outs


def dump_all(calls: Sequence[tuple[Config, str, bool]]) -> None:
    for call in calls:
        dump_step(*call)
        leave_layout()


@pytest.mark.parametrize("command", COMMANDS)
def test_dump(dumps: dict[str, Path], truth: Reference, command: str) -> None:
    facts = json.loads(dumps[command].with_name(f"{dumps[command].name}.json").read_text())
    numbers = Numbers(gradients=load_file(dumps[command]), logprobs=facts["logprobs"])
    expected = Numbers(gradients=truth.gradients, logprobs=truth.logprobs)
    tolerance = TOLERANCE["float32" if "zero" in command else "float64"]
    assert worst_gradient(numbers, expected)[0] < tolerance
    assert worst_logprob(numbers, expected) < tolerance
    norm = sum(gradient.square().sum() for gradient in truth.gradients.values()) ** 0.5
    assert abs(facts["grad_norm"] / norm - 1) < tolerance and abs(facts["loss"] / truth.loss - 1) < tolerance
    assert facts["trained_tokens"] == sum(rollout.trained_tokens for rollout in ROLLOUTS)
    assert facts["tokens"]["logical"] == sum(len(rollout) - 1 for rollout in ROLLOUTS)
    assert (
        facts["tokens"]["loss"] < facts["trained_tokens"] and facts["tokens"]["executed"] < facts["tokens"]["logical"]
    )
    assert facts["state_bytes"]["state"] > 0 and facts["peak_bytes"] > 0
