from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_branch.tracking.jsonl import JsonlSink, read_metrics


def test_rows_are_readable_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    code = (
        "import os, pathlib, sys; from megatron_branch.tracking.jsonl import JsonlSink\n"
        "sink = JsonlSink(pathlib.Path(sys.argv[1]))\n"
        "sink.log(1, {'actor/pg_loss': 0.25}); sink.log(2, {'actor/pg_loss': float('nan')}); os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=Path.cwd(), env={**os.environ, "PYTHONPATH": "."}
    )
    assert done.returncode == 9
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert rows == [
        {"training/global_step": 1, "actor/pg_loss": 0.25},
        {"training/global_step": 2, "actor/pg_loss": None},
    ]


def test_resume_keeps_the_rows_before_and_sets_aside_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.log(step, {"actor/lr": step})
    sink.close()
    with path.open("a") as file:
        file.write('{"training/global_step": 4, "act')  # the crash cut this line short

    sink = JsonlSink(path, first_step=3)
    sink.log(3, {"actor/lr": 30})
    sink.close()
    assert [row["actor/lr"] for row in read_metrics(path)] == [1, 2, 30]
    assert [row["actor/lr"] for row in read_metrics(path.with_name("metrics.jsonl.replaced"))] == [1, 2, 3]


def test_a_line_cut_short_does_not_swallow_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"training/global_step": 1}\n{"training/gl')
    sink = JsonlSink(path, first_step=2)
    sink.log(2, {})
    sink.close()
    assert [row["training/global_step"] for row in read_metrics(path)] == [1, 2]


def test_resume_at_the_next_step_only_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path, first_step=step)
        sink.log(step, {})
        sink.close()
    assert [row["training/global_step"] for row in read_metrics(path)] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"tracking\.run_dir = .*file.*cannot be written: File exists; choose"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_names_file_and_step(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(6, {"actor/lr": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match=r"metrics of step 7 cannot be written: No space left.*metrics\.jsonl"):
            sink.log(7, {"actor/lr": 1.0})
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [row["training/global_step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [6]
