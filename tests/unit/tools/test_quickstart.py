"""The orchestration: what is skipped, what is launched with which settings, and what is said at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_branch.config import load_config
from tools import quickstart
from tools.quickstart import CONFIG, DENSE, ROOT, Job, launch_environment, make_job, outputs, sample, summary, train
from tools.quickstart_prompts import EXCERPTS


class Commands:
    """Stands in for `run`: records commands, and writes the files that they would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.prompts = "prompts"

    def __call__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.seen.append(list(command))
        self.environments.append(environment or {})
        if "--out" in command:
            out = self.root / command[command.index("--out") + 1]
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(self.prompts if "prompts" in command[0] else f"rollouts {len(self.seen)}")
        if "launch/train.py" in command:
            folder = self.root / command[-1].removeprefix("tracking.run_dir=")
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text('{"training/global_step": 1}\n')

    def sampled(self) -> int:
        return sum(command[0] == "tools/sample_rollouts.py" for command in self.seen)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    recorded = Commands(tmp_path)
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart, "run", recorded)
    return recorded


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(0)


def test_without_a_gpu_two_ranks_split_every_chunk(job: Job) -> None:
    assert job.ranks == 2 and job.overrides == ()
    assert (job.config.parallel.cp, job.config.branch.gradient, job.config.steps) == (2, "exact", 3)
    assert (job.config.optimizer.name, job.config.tracking.wandb) == ("adamw", "offline")


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_gpus_are_used_two_at_most(gpus: int, ranks: int) -> None:
    made = make_job(gpus)
    assert made.ranks == made.config.parallel.cp == ranks
    assert made.config.model.dtype == made.sampling()["dtype"] == "bfloat16"


def test_every_step_trains_the_questions_over_one_excerpt(job: Job) -> None:
    assert job.config.steps == len(EXCERPTS)
    assert {len(excerpt.questions) for excerpt in EXCERPTS} == {job.config.data.groups_per_step}
    assert not job.config.data.shuffle


def test_the_dense_step_differs_in_the_gradient_alone(job: Job) -> None:
    dense = load_config(ROOT / CONFIG, [f"{key}={value}" for key, value in DENSE.items()])
    assert dense.branch == job.config.branch.model_copy(update={"gradient": "dense"})
    for section in ("model", "data", "parallel", "objective", "optimizer", "zero", "attention", "seed"):
        assert getattr(dense, section) == getattr(job.config, section)


def test_rollouts_are_sampled_at_the_trained_temperature_once(job: Job, commands: Commands) -> None:
    sample(job)
    arguments = commands.seen[-1]
    assert arguments[arguments.index("--temperature") + 1] == str(job.config.objective.temperature)
    sample(job)
    assert commands.sampled() == 1


@pytest.mark.parametrize("change", ["prompts", "settings", "rollouts edited", "rollouts removed"])
def test_rollouts_are_sampled_again_after_a_change(
    job: Job, commands: Commands, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sample(job)
    if change == "prompts":
        commands.prompts = "other"
    elif change == "settings":
        monkeypatch.setitem(quickstart.SAMPLING, "seed", "1")
    elif change == "rollouts edited":
        (commands.root / job.rollouts).write_text("edited")
    else:
        (commands.root / job.rollouts).unlink()
    sample(job)
    assert commands.sampled() == 2


def test_training_starts_from_an_empty_run_folder_through_the_launcher(job: Job, commands: Commands) -> None:
    stale = commands.root / "runs/x/checkpoints/global_step_3"
    stale.mkdir(parents=True)
    assert train(job, ["steps=1"], Path("runs/x")) == [{"training/global_step": 1}]
    assert not stale.exists()
    words = commands.seen[-1]
    assert words[:2] == ["-m", "deepspeed.launcher.runner"]
    assert words[words.index("--num_accelerators") + 1] == "2"
    assert words[-5:] == ["launch/train.py", "--config", str(CONFIG), "steps=1", "tracking.run_dir=runs/x"]
    environment = commands.environments[-1]
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_training_without_metrics_is_an_error(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart, "run", lambda *_: None)
    with pytest.raises(ValueError, match=r"without a row in runs/x/metrics.jsonl"):
        train(job, [], Path("runs/x"))


def test_ranks_divide_the_cores(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, "1"), (2, "1"), (8, "4")):
        monkeypatch.setattr(quickstart.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert launch_environment(job)["OMP_NUM_THREADS"] == threads


def test_a_failed_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exit code 3 from: -c raise SystemExit"):
        quickstart.run(["-c", "raise SystemExit(3)"])


def row(**other: float) -> dict[str, Any]:
    return {
        "perf/total_num_tokens": 1000,
        "branch/shared_tokens": 750,
        "timing_s/step": 4.0,
        "reward/mean": 0.5,
        "branch/speedup_bound": 3.0,
        **{key.replace("__", "/"): value for key, value in other.items()},
    }


def test_the_summary_counts_all_steps_and_compares_the_first() -> None:
    lines = summary([row(), row(timing_s__step=99.0, reward__mean=0.25)], row(timing_s__step=10.0))
    assert "2,000 in dense training, 500 computed (x4.0 fewer)" in lines[0]
    assert "4.0 s, dense 10.0 s: x2.50 faster (bound by FLOPs x3.00)" in lines[1]
    assert "0.500, 0.250" in lines[2]


def test_what_is_missing_at_the_end_is_named(job: Job, commands: Commands) -> None:
    run_dir = commands.root / job.run_dir
    with pytest.raises(ValueError, match=r"metrics .*W&B run .*schedule timeline .*Hugging Face checkpoint"):
        outputs(job)
    for name in ("metrics.jsonl", "schedule.png", "wandb/offline-run-1/x", "checkpoints/global_step_3/hf/config.json"):
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({}))
    found = outputs(job)
    assert found["Hugging Face checkpoint"] == run_dir / "checkpoints/global_step_3/hf"
    assert found["W&B run (offline)"] == run_dir / "wandb/offline-run-1"
