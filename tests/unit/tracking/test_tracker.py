from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_branch.tracking.config import TrackingConfig
from megatron_branch.tracking.jsonl import read_metrics
from megatron_branch.tracking.tracker import Tracker, make_tracker


class _Rows:
    def __init__(self, fail_on_close: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed: list[int] = []
        self.fail_on_close = fail_on_close

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self, exit_code: int = 0) -> None:
        self.closed.append(exit_code)
        if self.fail_on_close:
            raise OSError("close")


def test_a_row_goes_to_every_sink() -> None:
    sinks = _Rows(), _Rows()
    with Tracker(sinks) as tracker:
        tracker.log(4, {"actor/lr": 1.0})
        tracker.log(6, {"actor/lr": 2.0})
    for sink in sinks:
        assert sink.rows == [(4, {"actor/lr": 1.0}), (6, {"actor/lr": 2.0})]
        assert sink.closed == [0]


def test_undeclared_keys_and_repeated_steps_reach_no_sink() -> None:
    sink = _Rows()
    tracker = Tracker([sink])
    with pytest.raises(KeyError, match="actor/loss"):
        tracker.log(1, {"actor/loss": 1.0})
    tracker.log(2, {})
    for step in (2, 1):
        with pytest.raises(AssertionError, match="one row per step"):
            tracker.log(step, {})
    assert sink.rows == [(2, {})]


def test_a_rank_without_sinks_checks_keys_too() -> None:
    with pytest.raises(KeyError, match="actor/loss"):
        Tracker().log(1, {"actor/loss": 1.0})


def test_closing_reaches_every_sink_and_tells_of_failure() -> None:
    sinks = _Rows(fail_on_close=True), _Rows()
    with pytest.raises(OSError, match="close"), Tracker(sinks):
        pass
    assert sinks[1].closed == [0]
    sinks = _Rows(), _Rows()
    with pytest.raises(ZeroDivisionError), Tracker(sinks):
        raise ZeroDivisionError
    assert [sink.closed for sink in sinks] == [[1], [1]]


def test_metrics_and_console_without_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_tracker(TrackingConfig(run_dir=tmp_path), writer=True, steps=2, run_config={"steps": 2}) as tracker:
        tracker.log(1, {"perf/time_per_step": 2.0, "actor/pg_loss": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"training/global_step": 1, "perf/time_per_step": 2.0, "actor/pg_loss": 0.5}
    ]
    assert capsys.readouterr().out == "step 1/2 | 2 s | loss 0.5 | eta 2s\n"
    assert {entry.name for entry in tmp_path.iterdir()} == {"config.yaml", "metrics.jsonl"}
    assert (tmp_path / "config.yaml").read_text() == "steps: 2\n"
