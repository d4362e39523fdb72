"""The check of a GPU, as far as a machine without one can run it: its table, its refusals, its parity on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tools.gpu_check import SMALL, Line, in_new_process, parity, peak_and_plan, table

ROOT = Path(__file__).parents[3]


def test_the_table_lines_up_and_says_what_failed() -> None:
    lines = [Line("kernels", True, "9 passed", "all pass"), Line("memory: 32,768 positions", False, "1.2", "1.05")]
    assert table(lines).splitlines() == [
        "check                     result  found     limit",
        "kernels                   ok      9 passed  all pass",
        "memory: 32,768 positions  FAILED  1.2       1.05",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = subprocess.run(["tools/gpu_check.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_check: nvidia-smi finds no NVIDIA GPU") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--wheels"], ["--wheels", "/nowhere"], ["--help"]])
def test_a_wrong_command_line_is_answered_with_the_right_one(arguments: list[str]) -> None:
    done = subprocess.run(["tools/gpu_check.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "tools/gpu_check.sh [--wheels DIR]" in done.stderr


def test_wheels_are_installed_without_a_network_before_anything_runs(tmp_path: Path) -> None:
    """With stand-ins for the GPU and for python, which say how they were called."""
    for name, text in {
        "nvidia-smi": "exit 0",
        "python3": f'echo "python3 $*" >> {tmp_path}/calls; mkdir -p {tmp_path}/clone/.venv/bin; '
        f"ln -sf {tmp_path}/python3 {tmp_path}/clone/.venv/bin/python",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "clone" / "tools").mkdir(parents=True)
    script = tmp_path / "clone" / "tools" / "gpu_check.sh"
    script.write_bytes((ROOT / "tools" / "gpu_check.sh").read_bytes())
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", script, "--wheels", str(tmp_path)], env=environment, check=True)
    made, *installed, checked = (tmp_path / "calls").read_text().splitlines()
    assert made == "python3 -m venv .venv"
    assert len(installed) == 2 and all(f"--no-index --find-links {tmp_path}" in call for call in installed)
    assert checked == "python3 tools/gpu_check.py"


def test_parity_holds_on_the_cpu() -> None:
    (line,) = parity()
    assert line.holds, line
    assert line.check == "parity: error of exact over dense" and line.limit == "2.00"


def test_the_plan_counts_what_a_step_holds() -> None:
    """What a CPU process takes beside it cannot be told apart; the length must show in the plan."""
    planned = []
    for positions in (1024, 2048):
        measured, count = in_new_process(peak_and_plan, positions, SMALL, 256)
        assert measured > 0
        planned.append(count)
    state = SMALL["layers"] * 2 * SMALL["kv_heads"] * SMALL["head_dim"] * (4 + 4)
    assert planned[1] - planned[0] == pytest.approx(1024 * state, rel=0.05)
