"""The command draws what is there, and fails with one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts

TOOL = Path(__file__).parents[3] / "tools" / "show_tree.py"


def show(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    # From a checkout, whether or not the package is installed.
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.fixture(scope="module")
def rollouts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show_tree") / "f.jsonl"
    spec = SyntheticSpec(
        prefix_tokens=(12, 5), fan_out=(2, 2), tail_tokens=(3, 8), strict_prefixes=1, train_shared=True
    )
    write_rollouts(path, synthetic_rollouts(spec))
    return path


def test_the_drawing(rollouts_file: Path) -> None:
    result = show(rollouts_file, "--width", 200)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    start = lines.index("tree 0: rollouts 5, groups 1, inputs 43 (dense 103)")
    shapes = [line.split("  ids")[0] for line in lines[start + 1 : start + 9]]
    assert shapes == [
        "0 [0..12) x5  trained 0",
        "├─ 1 [12..17) x3  trained 5",
        "│  ├─ 2 [17..18) x2  trained 1",
        "│  │  └─ 3 [18..20) x1  trained 2",
        "│  └─ 4 [17..25) x1  trained 8",
        "└─ 5 [12..17) x2  trained 5",
        "   ├─ 6 [17..20) x1  trained 3",
        "   └─ 7 [17..25) x1  trained 8",
    ]
    assert lines[start + 3].endswith("ends: g0.5") and "ends" not in lines[start + 2]
    assert "5 rollouts of 1 groups in 1 trees: 8 nodes, depth 4" in result.stdout


def test_lines_are_cut_to_the_width(rollouts_file: Path) -> None:
    lines = show(rollouts_file, "--width", 40).stdout.splitlines()
    drawing = lines[lines.index("tree 0: rollouts 5, groups 1, inputs 43…") :]
    assert max(len(line) for line in drawing[:9]) == 40


def test_json(rollouts_file: Path) -> None:
    found = json.loads(show(rollouts_file, "--json").stdout)
    assert found["stats"]["tree_tokens"] == 43 and found["stats"]["token_ratio"] == 43 / 103
    node = found["trees"][0]["nodes"][2]
    assert (node["start"], node["end"], node["rollouts"], node["trained"]) == (17, 18, [0, 4], 1)
    assert found["rollouts"][4] == "g0.5"


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"group_id": 1}\n')
    for name, message in (("bad.jsonl", "bad.jsonl:1: token_ids is missing"), ("absent.jsonl", "cannot be read")):
        result = show(tmp_path / name)
        assert result.returncode == 1 and result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and message in result.stderr
    assert show().returncode == 2 and show(tmp_path / "bad.jsonl", "--width", 3).returncode == 2


def test_help_states_input_and_output() -> None:
    text = show("--help").stdout
    assert "Input:" in text and "Output:" in text
