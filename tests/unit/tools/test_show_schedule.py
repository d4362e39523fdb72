"""The command that shows a schedule."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts


@pytest.fixture(scope="module")
def show_schedule() -> Callable[[Sequence[str]], int]:
    path = Path(__file__).parents[3] / "tools" / "show_schedule.py"
    spec = importlib.util.spec_from_file_location("show_schedule", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    write_rollouts(path, synthetic_rollouts(SyntheticSpec(prefix_tokens=(9,), fan_out=(2,), tail_tokens=(4,))))
    return str(path)


def test_it_prints_orders_timeline_and_bound(
    show_schedule: Callable[[Sequence[str]], int], rollouts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_schedule([rollouts, "--chunk_tokens", "4", "--pp", "2", "--cp", "2", "--dp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "stage 0: C0.0 C0.1 T0.0> T0.1> T0.0< T0.1< R0.1 R0.0\n" in shown
    assert "stage 1: C0.0 C0.1 T0.0 T0.1 R0.1 R0.0\n" in shown
    assert "peak state 8 tokens (4 on each of 2 context-parallel ranks)" in shown
    assert "data-parallel rank 1: trees none" in shown
    assert "tokens: dense 24, computed 16, head 8" in shown


def test_it_writes_a_trace(show_schedule: Callable[[Sequence[str]], int], rollouts: str, tmp_path: Path) -> None:
    assert show_schedule([rollouts, "--trace", str(tmp_path / "trace.json")]) == 0
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "0"], "--pp 0: must be at least 1"),
        (["--chunk_tokens", "0"], "--chunk_tokens 0"),
        (["--rank", "1"], "--rank 1: must be below --dp 1"),
        (["--shape", "4,x"], "--shape 4,x: must be seven positive integers"),
        (["--trace", "/no/such/folder/trace.json"], "/no/such/folder/trace.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    show_schedule: Callable[[Sequence[str]], int],
    rollouts: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert show_schedule([rollouts, *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_file_is_one_line(
    show_schedule: Callable[[Sequence[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_schedule([str(tmp_path / "none.jsonl")]) == 1
    error = capsys.readouterr().err
    assert "none.jsonl" in error and error.count("\n") == 1
