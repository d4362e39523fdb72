"""Runs as users start them: what they write, what they say, and how they end when a rank dies or fails."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_branch.engine.resume import verify
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts
from tests.launch.job import ROOT, Job, run_job, start_job
from tests.tiny import write_tiny_model
from tests.wandb_file import history_rows, run_records

STEPS = 3
ALWAYS = {
    *(f"actor/{name}" for name in ("pg_loss", "entropy", "ppo_kl", "pg_clipfrac", "grad_norm", "lr")),
    *(f"reward/{name}" for name in ("mean", "std", "min", "max", "frac_zero_std")),
    *("response_length/mean", "prompt_length/mean"),
    *(
        f"timing_s/{name}"
        for name in ("read", "tree", "plan", "capture", "tail", "replay", "optimizer", "checkpoint", "step")
    ),
    *(f"perf/{name}" for name in ("throughput", "total_num_tokens", "time_per_step", "max_memory_allocated_gb")),
    *(
        f"branch/{name}"
        for name in (
            "tree_token_ratio",
            "shared_tokens",
            "tails_per_tree",
            "state_bytes_peak",
            "bubble_fraction",
            "speedup_bound",
            "dense_trees",
        )
    ),
    *("training/global_step", "training/consumed_rollouts"),
}
WITH_PEAK_FLOPS = {"perf/mfu/actor", "perf/hfu/actor"}
LINE = re.compile(
    r"step (\d)/3 \| [\d.e+-]+ s \| loss [\d.e+-]+ \| reward [\d.e+-]+ \| grad [\d.e+-]+ \| "
    r"tokens [\d.]+k? \(computed [\d.]+k?, x[\d.]+\) \| [\d.]+k? tok/s \| (?:mfu [\d.]+% \| )?"
    r"state [\d.]+ [KM]?i?B \| eta \d+[sm]"
)


@dataclass(frozen=True)
class Run:
    """A finished run and where it wrote."""

    job: Job
    folder: Path

    def rows(self) -> list[dict[str, Any]]:
        """The metrics."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and six groups of rollouts, two to a step."""
    folder = tmp_path_factory.mktemp("runs")
    write_tiny_model(folder / "model", "qwen3", layers=2)
    spec = SyntheticSpec(prefix_tokens=(24,), fan_out=(3,), tail_tokens=(5, 9, 2), groups=2 * STEPS, logprobs=True)
    write_rollouts(folder / "rollouts.jsonl", synthetic_rollouts(spec))
    return folder


def config(place: Path, name: str, **sections: dict[str, Any]) -> Path:
    """A configuration file; the run writes to `place/name`."""
    values: dict[str, Any] = {
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {"rollouts": str(place / "rollouts.jsonl"), "groups_per_step": 2},
        "branch": {"chunk_tokens": 16},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "tracking": {"run_dir": str(place / name)},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    (place / name).mkdir()
    path = place / name / "c.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def context(place: Path) -> Run:
    """Two context-parallel ranks, with everything that can be asked for."""
    path = config(
        place,
        "cp",
        parallel={"cp": 2},
        optimizer={"schedule": "linear", "warmup_steps": 1, "min_lr": 1e-4},
        checkpoint={"every_steps": 1, "keep": 2, "export_hf": True},
        tracking={"wandb": "offline", "peak_flops": 1e12, "plot_schedule": True},
    )
    return Run(run_job(path, limit_s=240), path.parent)


@pytest.fixture(scope="module")
def stages(place: Path) -> Run:
    """Two pipeline stages at ZeRO 1; rank 0, which writes, has no loss."""
    path = config(place, "pp", parallel={"pp": 2}, zero={"stage": 1}, tracking={"wandb": "offline", "profile_steps": 2})
    return Run(run_job(path, limit_s=240), path.parent)


def test_runs_succeed_and_leave_no_process(context: Run, stages: Run) -> None:
    for run in (context, stages):
        assert run.job.code == 0, run.job.err
        assert run.job.left_behind == []


def test_one_row_per_step_with_every_key(context: Run, stages: Run) -> None:
    for run, keys in ((context, ALWAYS | WITH_PEAK_FLOPS), (stages, ALWAYS)):
        rows = run.rows()
        assert [row["training/global_step"] for row in rows] == [1, 2, 3]
        assert [row["training/consumed_rollouts"] for row in rows] == [6, 12, 18]
        for row in rows:
            assert row.keys() == keys
            assert all(isinstance(value, (int, float)) for value in row.values()), row
        assert rows[0]["timing_s/read"] > 0 == rows[1]["timing_s/read"]
        for row in rows:
            assert min(row[f"timing_s/{phase}"] for phase in ("capture", "tail", "replay", "optimizer")) > 0
            assert row["timing_s/step"] == row["perf/time_per_step"]
    assert all(row["timing_s/checkpoint"] > 0 for row in context.rows())
    assert [row["timing_s/checkpoint"] > 0 for row in stages.rows()] == [False, False, True]


def test_recorded_steps_show_every_action_of_every_rank(stages: Run) -> None:
    folder = stages.folder / "timeline"
    assert sorted(path.name for path in folder.iterdir()) == ["step_1.json", "step_1.png", "step_2.json", "step_2.png"]
    for number, row in zip((1, 2), stages.rows(), strict=False):
        events = json.loads((folder / f"step_{number}.json").read_text())["traceEvents"]
        names = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert names == ["dp 0 pp 0 cp 0 tp 0", "dp 0 pp 1 cp 0 tp 0"]
        first, second = ([e for e in events if e["ph"] == "X" and e["tid"] == rank] for rank in (0, 1))
        # Forward and backward of a tail are two actions on all stages but the last.
        assert {e["name"].rstrip("<>") for e in first} == {e["name"] for e in second} and len(first) > len(second) > 6
        for mine in (first, second):
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(mine, mine[1:], strict=False))
            assert 0 < sum(e["dur"] for e in mine) / 1e6 < row["timing_s/step"]
        captured = {e["name"]: e["ts"] for e in first if e["cat"] == "capture"}
        received = {e["name"]: e["ts"] + e["dur"] for e in second if e["cat"] == "capture"}
        assert all(captured[name] < received[name] for name in captured)
        assert (folder / f"step_{number}.png").read_bytes().startswith(b"\x89PNG")
    assert "timeline" in stages.job.out


def test_numbers_do_not_depend_on_the_layout(context: Run, stages: Run) -> None:
    """Of the first step, before any update: the loss is there and right where another stage computes it."""
    one, other = context.rows()[0], stages.rows()[0]
    for key in (
        "actor/pg_loss",
        "actor/entropy",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/grad_norm",
        "reward/mean",
    ):
        assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7), key
    assert one["actor/pg_loss"] != 0
    assert one["actor/entropy"] > 0


def test_learning_rate_follows_its_schedule(context: Run) -> None:
    assert [row["actor/lr"] for row in context.rows()] == pytest.approx([1e-3, 5.5e-4, 1e-4])


def test_utilisation_is_work_over_time_and_peak(context: Run) -> None:
    for row in context.rows():
        assert 0 < row["perf/mfu/actor"] < row["branch/speedup_bound"] * row["perf/hfu/actor"] * 1.000001
        assert row["perf/mfu/actor"] == pytest.approx(row["branch/speedup_bound"] * row["perf/hfu/actor"])


def test_console_says_what_runs_then_a_line_per_step(context: Run, stages: Run) -> None:
    for run, topology in ((context, "2 cpu ranks: tp 1, cp 2, pp 1, dp 1"), (stages, "2 cpu ranks: tp 1, cp 1, pp 2")):
        lines = [line for line in run.job.out.splitlines() if not line.startswith("[20")]  # DeepSpeed's launcher
        assert lines[0].startswith("versions  python 3.")
        assert lines[1].startswith(f"topology  {topology}")
        assert lines[2].startswith("trees     6 rollouts of 2 groups")
        assert lines[5].startswith("peak      ")
        shown = [LINE.fullmatch(line) for line in lines[6:] if not line.startswith(("saved     ", "timeline  "))]
        assert [match and match[1] for match in shown] == ["1", "2", "3"], lines
        assert ("mfu" in run.job.out) == (run is context)


def test_nothing_is_said_that_a_user_cannot_use(context: Run, stages: Run) -> None:
    for run in (context, stages):
        noise = [line for line in run.job.err.splitlines() if not line.startswith("wandb: ")]
        assert noise == []
        assert "Run history" not in run.job.err
        assert "built successfully" not in run.job.out


def test_one_offline_wandb_run_with_a_row_per_step(context: Run, stages: Run) -> None:
    for run in (context, stages):
        assert len(list((run.folder / "wandb").glob("offline-run-*"))) == 1
        logged = history_rows(run.folder)
        rows = run.rows()
        assert len(logged) == STEPS
        for row, one in zip(rows, logged, strict=True):
            assert {key: one[key] for key in row} == pytest.approx(row)
            assert not math.isnan(one["actor/pg_loss"])
        exits = [record.exit.exit_code for record in run_records(run.folder) if record.HasField("exit")]
        assert exits in ([0], [])


def test_checkpoints_are_whole_and_only_the_newest_stay(context: Run, stages: Run) -> None:
    folder = context.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step_2",
        "global_step_2_hf",
        "global_step_3",
        "global_step_3_hf",
        "latest",
    ]
    assert (folder / "latest").read_text().strip() == "global_step_3"
    for run in (context, stages):
        checkpoint = run.folder / "checkpoints" / "global_step_3"
        state = verify(checkpoint)
        assert (state["step"], state["consumed_rollouts"], state["updates"]) == (3, 18, 3)
        (logged,) = {record.run.run_id for record in run_records(run.folder) if record.HasField("run")}
        assert state["wandb_id"] == logged
        assert state["config"]["optimizer"]["lr"] == 1e-3
        assert {entry["kind"] for entry in state["files"].values()} == {"masters", "exp_avg", "exp_avg_sq"}
        (export,) = [load_file(path) for path in (context.folder / "checkpoints").glob("*_3_hf/model.safetensors")]
        masters = load_file(checkpoint / "masters-00001.safetensors")
        assert masters.keys() == export.keys()
        if run is context:
            assert all(torch.equal(masters[name], export[name]) for name in export)


def test_export_loads_with_strict_keys_and_is_trained(place: Path, context: Run) -> None:
    folder = context.folder / "checkpoints" / "global_step_3_hf"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = (load_file(path / "model.safetensors") for path in (place / "model", folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "layers" in name} <= changed
    earlier = load_file(folder.with_name("global_step_2_hf") / "model.safetensors")
    assert not torch.equal(earlier["model.norm.weight"], after["model.norm.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 97)


def test_schedule_is_drawn(context: Run) -> None:
    assert (context.folder / "schedule.png").read_bytes().startswith(b"\x89PNG")


WRAPPER = """
import runpy, sys
from megatron_branch.schedule.runner import Runner
act = Runner._act
def faulty(self, action, source, forward_only, reports):
    {before}
    return act(self, action, source, forward_only, reports)
Runner._act = faulty
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


def wrapped(place: Path, name: str, before: str) -> Path:
    """A script that trains with a fault in the runner."""
    script = place / f"{name}.py"
    script.write_text(WRAPPER.format(before=before, train=str(ROOT / "launch" / "train.py")))
    return script


def test_a_rank_that_fails_in_a_tree_ends_the_job_and_says_where(place: Path) -> None:
    path = config(place, "failing", parallel={"cp": 2})
    before = (
        "import torch.distributed as dist\n"
        "    if dist.get_rank() == 1 and action.kind == 'replay': raise KeyError('broken on purpose')"
    )
    script = wrapped(place, "failing", before)
    with start_job(script, "--config", str(path), ranks=2, folder=path.parent) as job:
        ended = job.wait(limit_s=240)
    assert ended.code not in (0, None)
    assert ended.left_behind == []
    cause = [line for line in ended.err.splitlines() if line.startswith("train.py: rank 1: ")]
    assert len(cause) == 1, ended.err
    assert re.search(r"step 1/3, tree \d, action R[\d:.]+ at slot \d+: KeyError: 'broken on purpose'$", cause[0])
    assert "in faulty" in ended.err, "the traceback is shown"
    assert ended.err.count("Traceback") == 2, "of the fault, and of the step that it ended"
    assert "train.py: rank 0: " not in ended.err


def test_a_rank_that_is_killed_ends_the_job(place: Path) -> None:
    """Also: two jobs at a time on one machine, of which the other one is not disturbed."""
    path, other = (config(place, name, parallel={"cp": 2}) for name in ("killed", "beside"))
    script = wrapped(place, "slow", "import time; time.sleep(0.3)")
    with (
        start_job(script, "--config", str(path), ranks=2, folder=path.parent) as job,
        start_job(script, "--config", str(other), ranks=2, folder=other.parent) as beside,
    ):
        job.wait_for("step 1/3", limit_s=240)
        os.kill(job.ranks()[1], signal.SIGKILL)
        ended = replace(job.wait(limit_s=60), seconds=0.0)
        undisturbed = beside.wait(limit_s=240)
    assert ended.code not in (0, None)
    assert ended.left_behind == []
    assert "step 3/3" not in ended.out
    assert "Traceback" not in ended.err
    assert undisturbed.code == 0, undisturbed.err
    assert "step 3/3" in undisturbed.out
