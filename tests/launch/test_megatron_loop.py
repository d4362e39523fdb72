"""The example of a Megatron loop runs as its users start it, on CPUs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launch.job import ROOT, start_job

LINE = re.compile(r"step (\d) \| (trees|ordinary) \| loss (-?\d+\.\d{6})")


def test_trees_and_ordinary_batches_in_turn(tmp_path: Path) -> None:
    with start_job(ROOT / "launch" / "megatron_loop.py", "--pp", "2", ranks=2, folder=tmp_path) as running:
        job = running.wait(limit_s=200)
    assert job.code == 0, job.err
    assert not job.left_behind
    lines = [match.groups() for match in LINE.finditer(job.out)]
    assert [line[:2] for line in lines] == [("1", "trees"), ("2", "ordinary"), ("3", "trees"), ("4", "ordinary")]
    losses = [float(line[2]) for line in lines]
    assert losses[2] < losses[0] and losses[3] < losses[1]
