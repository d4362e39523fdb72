from __future__ import annotations

import io
import re

import pytest

from megatron_branch.tracking.console import Console, Header, bytes_text, duration_text, step_line

METRICS = {
    "perf/time_per_step": 8.21,
    "actor/pg_loss": 0.0132,
    "reward/mean": 0.412,
    "actor/grad_norm": 0.83,
    "perf/total_num_tokens": 1.31e6,
    "branch/tree_token_ratio": 1.31 / 0.29,
    "perf/throughput": 21_400.0,
    "perf/mfu/actor": 0.381,
    "branch/state_bytes_peak": 11.2 * 2**30,
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_step_line_has_the_documented_shape() -> None:
    assert step_line(12, METRICS, steps=200, eta_s=26 * 60) == (
        "step 12/200 | 8.21 s | loss 0.0132 | reward 0.412 | grad 0.83 | tokens 1.31M (computed 0.29M, x4.5) | "
        "21.4k tok/s | mfu 38.1% | state 11.2 GiB | eta 26m"
    )


def test_step_line_leaves_out_what_there_is_not() -> None:
    assert step_line(1, {"perf/time_per_step": 0.5}, steps=2, eta_s=0.5) == "step 1/2 | 0.5 s | eta 0s"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (18 * 2**30, "18.0 GiB"), (2**61, "2048.0 PiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45s"), (59.9, "1m"), (26 * 60, "26m"), (3599, "1h00m"), (3 * 3600 + 300, "3h05m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_log_of_a_file_has_no_control_characters_and_long_lines_stay_whole() -> None:
    stream = io.StringIO()
    console = Console(steps=200, stream=stream)
    console.header(Header(topology="dp=1 pp=2", trees="[bold]" * 40, peak_bytes={"state": 3 * 2**30, "adjoint": 2**30}))
    with console.progress(12, 3) as advance:
        advance()
    console.log(12, METRICS)
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert len(text.splitlines()) == 5
    assert re.search(r"python 3\.\d+.*torch 2\..*megatron-core 0\..*deepspeed 0\..*transformers 5\.", text)
    assert "[bold]" * 40 in text
    assert "4.0 GiB (state 3.0 GiB, adjoint 1.0 GiB)" in text


def test_eta_is_the_mean_step_times_the_steps_left() -> None:
    stream = io.StringIO()
    console = Console(steps=12, stream=stream)
    console.log(1, {"perf/time_per_step": 5.0})
    console.log(2, {"perf/time_per_step": 1.0})
    assert [line.rpartition("eta ")[2] for line in stream.getvalue().splitlines()] == ["55s", "30s"]


def test_a_log_hears_of_long_steps_at_most_every_thirty_seconds() -> None:
    stream, clock = io.StringIO(), _Clock()
    console = Console(steps=9, stream=stream, clock=clock)
    with console.progress(3, 100) as advance:
        for _ in range(100):
            clock.now += 1.0
            advance()
    assert stream.getvalue().splitlines() == [f"step 3/9 | {done}/100 actions" for done in (30, 60, 90)]


def test_a_terminal_gets_a_bar_that_advances_and_goes_away() -> None:
    stream = _Terminal()
    console = Console(steps=9, stream=stream)
    with console.progress(3, 4) as advance:
        for _ in range(4):
            advance()
    text = stream.getvalue()
    assert "step 3/9" in text and "4/4" in text
    assert text.endswith("\x1b[2K")
