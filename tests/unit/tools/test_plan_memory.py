"""The planner: what it finds, what it refuses, and that training's own dry run takes what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.train import main as train
from megatron_branch.engine.tensor_layout import stage_elements
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts
from tests.tiny import write_tiny_model
from tools.plan_memory import main, read_model

ROOT = Path(__file__).parents[3]
STEP = ["--prompt", "20000", "--response", "500", "--rollouts", "4"]
# As the models' authors publish them, in billions of parameters.
PUBLISHED = {
    "qwen3_0_6b": 0.60, "qwen3_1_7b": 1.72, "qwen3_4b": 4.02, "qwen3_8b": 8.19, "qwen3_14b": 14.77, "qwen3_32b": 32.76,
    "qwen2_5_1_5b": 1.54, "qwen2_5_7b": 7.62, "llama3_1_8b": 8.03,
}  # fmt: skip


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What `--json` holds."""
    file = tmp_path / "plan.json"
    status = main([*arguments, "--json", str(file)])
    result: dict[str, Any] = json.loads(file.read_text())
    assert (status == 0) == (result["winner"] is not None)
    return result


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    (elements,) = stage_elements(read_model(name), tp=1, pp=1)
    assert sum(elements) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.006)


def test_a_winner_fits_and_is_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(tmp_path, "--model", "qwen3_4b", "--hardware", "2xH100", *STEP, "--chunk_tokens", "4096")
    winner = result["winner"]
    room = result["hardware"]["memory_bytes"] * result["assumed"]["memory"]
    assert all(stage["peak"] <= room and stage["peak"] >= stage["update"] for stage in winner["bytes"])
    assert all(other["seconds"]["total"] > 0.99 * winner["seconds"]["total"] for other in result["runners_up"])
    shown = capsys.readouterr().out
    assert "plan, not a measurement" in shown and "weights" in shown and "refused by rule" in shown


def test_what_is_given_is_not_searched(tmp_path: Path) -> None:
    fixed = ["--tp", "2", "--zero", "1", "--chunk_tokens", "4096", "branch.recompute_layers=true"]
    result = planned(tmp_path, "--model", "qwen3_4b", "--hardware", "2xH100", *STEP, *fixed)
    for candidate in [result["winner"], *result["runners_up"]]:
        config = candidate["config"]
        assert config["parallel"]["tp"] == 2 and config["zero"]["stage"] == 1
        assert config["branch"]["chunk_tokens"] == 4096 and config["branch"]["recompute_layers"] is True


def test_gradients_are_reduced_in_every_pass_where_their_bytes_decide(tmp_path: Path) -> None:
    asked = ["--model", "qwen3_14b", "--hardware", "4xH20", *STEP, "--tp", "1", "--pp", "1", "--chunk_tokens", "4096"]
    result = planned(tmp_path, *asked)
    assert {candidate["config"]["zero"]["reduce"] for candidate in [result["winner"], *result["runners_up"]]} == {
        "pass"
    }
    assert planned(tmp_path, *asked, "zero.reduce=step")["winner"] is None


def test_where_both_fit_gradients_are_reduced_once(tmp_path: Path) -> None:
    """Traffic decides: as often as there are backward passes against once."""
    asked = ["--model", "qwen3_1_7b", "--hardware", "2xH20", *STEP, "--tp", "1", "--pp", "1", "--chunk_tokens", "4096"]
    once, often = (
        planned(tmp_path, *asked, "--zero", "2", f"zero.reduce={name}")["winner"] for name in ("step", "pass")
    )
    assert often["bytes"][0]["device"]["gradients"] < once["bytes"][0]["device"]["gradients"]
    assert often["seconds"]["update"] > 2 * once["seconds"]["update"]
    assert planned(tmp_path, *asked, "--zero", "2")["winner"]["config"]["zero"]["reduce"] == "step"


def test_what_does_not_fit_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--tp", "1", "--chunk_tokens", "4096"]
    result = planned(tmp_path, "--model", "qwen3_32b", "--hardware", "1xA100", *STEP, *fixed)
    assert result["winner"] is None and result["rejected"]
    assert result["rejected"][0]["over"]["device"] > 100 * 2**30
    assert "over on the device (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen9", "--hardware", "8xH20", *STEP], "--model qwen9: is no file"),
        (["--model", "qwen3_8b", "--hardware", "8xH21", *STEP], "--hardware 8xH21: must be NUMBERxNAME"),
        (
            ["--model", "qwen3_8b", "--hardware", "H20", *STEP[:4], "--rollouts", "0"],
            "--rollouts 0: must be at least 1",
        ),
        (["--model", "qwen3_8b", "--hardware", "H20", *STEP, "branch.chunk=1"], "did you mean branch.chunk_tokens"),
    ],
)
def test_wrong_questions_are_answered_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_printed_configuration_goes_through_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3", layers=4)
    rows = synthetic_rollouts(SyntheticSpec(prefix_tokens=(300,), fan_out=(4,), tail_tokens=(20,)))
    write_rollouts(tmp_path / "rollouts.jsonl", rows)
    asked = ["--model", str(model), "--hardware", "2xthis_machine", "--prompt", "300", "--response", "20"]
    own = [f"model.path={model}", f"data.rollouts={tmp_path / 'rollouts.jsonl'}"]
    result = planned(tmp_path, *asked, "--rollouts", "4", "--dtype", "float32", "--zero", "1", *own)
    text = capsys.readouterr().out
    assert "this_machine" in text
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(result["winner"]["config"]))
    assert train(["--config", str(file), "--dry_run", "--world_size", "2"]) == 0
    assert "state on the fullest rank" in capsys.readouterr().out


def test_the_plan_of_the_readme_is_what_the_planner_finds(tmp_path: Path) -> None:
    """The layout that was found, looked at again: the search itself takes a minute."""
    kept = json.loads((ROOT / "configs" / "plans" / "qwen3_8b_8xh20_2m.json").read_text())["winner"]
    config = kept["config"]
    fixed = [f"{key}={value}" for section in ("parallel", "zero") for key, value in _dotted(section, config[section])]
    fixed += [f"{key}={json.dumps(value)}" for key, value in _dotted("branch", config["branch"])]
    shape = ["--prompt", "2088960", "--response", "8192", "--rollouts", "8"]
    again = planned(
        tmp_path, "--model", "qwen3_8b", "--hardware", "8xH20", *shape, *fixed, "branch.activations=recompute"
    )
    for part in ("bytes", "placement", "seconds"):
        assert again["winner"][part] == kept[part]


def _dotted(section: str, values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{section}.{key}", value) for key, value in values.items()]


def test_help_says_what_goes_in_and_out() -> None:
    command = [sys.executable, "tools/plan_memory.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "Inputs:" in shown and "Outputs:" in shown
