"""What ends a job: a rank that fails, is killed or hangs; a signal. One message, and no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts
from tests.launch.job import ROOT, Job, start_job
from tests.tiny import write_tiny_model

WRAPPER = """
import os, runpy, sys, time
import torch.distributed as dist
from megatron_branch.engine.trainer import Trainer
from megatron_branch.schedule.runner import Runner
act, step = Runner._act, Trainer.step
now = dict(step=0, action=0)
def counted(self, planned, *, number, total_steps):
    now.update(step=number, action=0)
    return step(self, planned, number=number, total_steps=total_steps)
def faulty(self, action, source, forward_only, reports):
    now["action"] += 1
    if (now["step"], now["action"]) == (2, 3):
        rank = dist.get_rank()
        {fault}
    return act(self, action, source, forward_only, reports)
Trainer.step, Runner._act = counted, faulty
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""
SLOW = "print('third action', flush=True); time.sleep(4)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and six groups of rollouts, two to a step."""
    folder = tmp_path_factory.mktemp("faults")
    write_tiny_model(folder / "model", "qwen3", layers=2)
    spec = SyntheticSpec(prefix_tokens=(24,), fan_out=(3,), tail_tokens=(5, 9, 2), groups=6, logprobs=True)
    write_rollouts(folder / "rollouts.jsonl", synthetic_rollouts(spec))
    return folder


def fault(place: Path, name: str, text: str, **keys: object) -> tuple[Path, Path]:
    """The script of a run whose ranks do `text` at their third action of step 2, and its configuration."""
    folder = place / name
    folder.mkdir()
    script, config = folder / "train.py", folder / "c.yaml"
    script.write_text(WRAPPER.format(fault=text, train=str(ROOT / "launch" / "train.py")))
    values = {
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {"rollouts": str(place / "rollouts.jsonl"), "groups_per_step": 2},
        "parallel": {"cp": 2},
        "branch": {"chunk_tokens": 16},
        "tracking": {"run_dir": str(folder)},
        **keys,
    }
    config.write_text(json.dumps(values))
    return script, config


def run(script: Path, config: Path, *, limit_s: float = 120) -> Job:
    """The job to its end."""
    with start_job(script, "--config", str(config), ranks=2, folder=config.parent) as job:
        return job.wait(limit_s=limit_s)


def only_message(job: Job) -> str:
    """The one line that the job says of its end; no process is left."""
    assert job.code not in (0, None), job.out
    assert job.left_behind == []
    lines = [line for line in job.err.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, job.err
    return lines[0]


def resumed_as_if_whole(place: Path, config: Path, *, after: int) -> None:
    """The run goes on behind a step, and ends bit for bit as one that nothing stopped."""
    whole = place / "whole"
    if not whole.exists():
        assert run(*fault(place, "whole", "pass")).code == 0
    train, arguments = ROOT / "launch" / "train.py", ("--config", str(config), "checkpoint.resume=auto")
    with start_job(train, *arguments, ranks=2, folder=config.parent) as job:
        ended = job.wait(limit_s=120)
    assert ended.code == 0, ended.err
    assert f"resumed   {config.parent}/checkpoints/global_step_{after}\n" in ended.out
    assert f"step {after + 1}/3" in ended.out and f"step {after}/3" not in ended.out
    for kind in ("masters", "exp_avg", "exp_avg_sq"):
        expected, got = (
            load_file(folder / "checkpoints" / "global_step_3" / f"{kind}-00001.safetensors")
            for folder in (whole, config.parent)
        )
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected), kind
    losses = [
        [(row["training/global_step"], row["actor/pg_loss"]) for row in map(json.loads, file.open())]
        for file in (whole / "metrics.jsonl", config.parent / "metrics.jsonl")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3


PLACE = r"step 2/3, tree \d, action T[\d:.]+ at slot 2: "


def test_a_rank_that_raises_says_where_and_no_other_speaks(place: Path) -> None:
    ended = run(*fault(place, "raises", "if rank == 1: raise KeyError('on purpose')"))
    assert re.fullmatch(f"train.py: rank 1: {PLACE}KeyError: 'on purpose'", only_message(ended)), ended.err
    assert ended.err.count("Traceback") == 2, "of the fault, and of the step that it ended"
    assert ended.code == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_say_where_a_killed_rank_was(place: Path, rank: int) -> None:
    """Rank 0 also takes the store of all ranks with it."""
    text = f"time.sleep(2)\n        if rank == {rank}: os.kill(os.getpid(), 9)"
    ended = run(*fault(place, f"killed{rank}", text))
    expected = rf"train.py: rank {rank}: {PLACE}its process \d+ has ended without a word .*"
    assert re.fullmatch(expected, only_message(ended)), ended.err
    assert "Traceback" not in ended.err


def test_a_rank_that_sleeps_ends_the_job_within_the_timeout(place: Path) -> None:
    script, config = fault(place, "sleeps", "if rank == 1: time.sleep(1000)", timeout_s=8)
    with start_job(script, "--config", str(config), ranks=2, folder=config.parent) as job:
        job.wait_for("step 1/3", limit_s=120)
        start = time.monotonic()
        ended = job.wait(limit_s=60)
        seconds = time.monotonic() - start
    expected = rf"train.py: rank 1: {PLACE}hangs: no rank has got on for 8 s .*, at train.py:\d+ \(faulty\); .*"
    assert re.fullmatch(expected, only_message(ended)), ended.err
    assert 8 < seconds < 16


def test_a_signal_to_the_launcher_ends_at_a_step_border_with_a_checkpoint(place: Path) -> None:
    script, config = fault(place, "stopped", SLOW)
    with start_job(script, "--config", str(config), ranks=2, folder=config.parent) as job:
        job.wait_for("third action", limit_s=120)
        job.signal(signal.SIGTERM)
        assert job.wait_code(limit_s=10) == -signal.SIGTERM, "DeepSpeed's launcher ends alone"
        end = time.monotonic() + 60
        while job.ranks() and time.monotonic() < end:
            time.sleep(0.1)
        ended = job.wait(limit_s=10)
    assert ended.left_behind == []
    assert "stopped   by a signal, after step 2/3" in ended.out, ended.out + ended.err
    assert "step 3/3" not in ended.out
    assert not [line for line in ended.err.splitlines() if line.startswith("train.py: ")], ended.err
    folder = config.parent / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_2", "latest"]
    rows = [json.loads(line) for line in (config.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [1, 2]


def test_a_signal_to_one_rank_stops_all_and_the_code_says_so(place: Path) -> None:
    script, config = fault(place, "one", SLOW)
    with start_job(script, "--config", str(config), ranks=2, folder=config.parent) as job:
        job.wait_for("third action", limit_s=120)
        os.kill(job.ranks()[1], signal.SIGTERM)
        ended = job.wait(limit_s=60)
    assert ended.code == 143, ended.err
    assert ended.left_behind == []
    assert "stopped   by a signal, after step 2/3" in ended.out
    assert (config.parent / "checkpoints" / "latest").read_text() == "global_step_2\n"
    resumed_as_if_whole(place, config, after=2)


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(place: Path) -> None:
    die = "lambda *_: (time.sleep(2), os.kill(os.getpid(), 9))"
    text = f"import megatron_branch.engine.checkpoint as c; c.os.rename = {die}"
    script, config = fault(place, "saving", text, checkpoint={"every_steps": 1})
    ended = run(script, config)
    expected = r"train.py: rank 0: step 2/3, checkpoint: its process \d+ has ended without a word .*"
    assert re.fullmatch(expected, only_message(ended)), ended.err
    folder = config.parent / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".global_step_2.partial", "global_step_1", "latest"]
    resumed_as_if_whole(place, config, after=1)
    assert sorted(path.name for path in folder.iterdir()) == [*(f"global_step_{n}" for n in (1, 2, 3)), "latest"]
