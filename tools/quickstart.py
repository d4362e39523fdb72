"""The whole job on a small real model: sample rollouts, train on their trees, load the result.

Input: nothing but this repository, the Python that runs it, and the package index (for the model, once).
Output: `.quickstart/` (model, prompts, rollouts; kept and used again) and `runs/quickstart/` (metrics, W&B run, picture
of the schedule, checkpoint; made anew by every run). SmolLM2-135M-Instruct is trained for three steps on two ranks
through the deepspeed launcher, by `configs/quickstart/`; the first step is then done once more densely, for comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_branch.config import Config, load_config
from megatron_branch.tracking.jsonl import read_metrics
from megatron_branch.tracking.tracker import METRICS_FILE

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Path("configs/quickstart/smollm2_cpu.yaml")
MOST_RANKS = 2
# The first step again, every rollout alone; the timing is all that is wanted of it.
DENSE = {
    "branch.gradient": "dense",
    "steps": "1",
    "checkpoint.at_end": "false",
    "checkpoint.export_hf": "false",
    "tracking.wandb": "disabled",
    "tracking.plot_schedule": "false",
}
SAMPLING = {"rollouts_per_prompt": "4", "max_new_tokens": "24", "seed": "0"}


@dataclass(frozen=True, slots=True)
class Job:
    """What runs where; paths are relative to the repository, which is the working directory.

    Attributes:
        config: the training configuration with the overrides applied.
        overrides: what this machine needs changed in the file.
        ranks: processes of the launcher.
        gpu: the ranks have accelerators.
    """

    config: Config
    overrides: tuple[str, ...]
    ranks: int
    gpu: bool

    @property
    def model(self) -> Path:
        return self.config.model.path

    @property
    def rollouts(self) -> Path:
        return self.config.data.rollouts

    @property
    def prompts(self) -> Path:
        return self.rollouts.with_name("prompts.jsonl")

    @property
    def dense_dir(self) -> Path:
        return self.rollouts.with_name("dense")

    @property
    def run_dir(self) -> Path:
        return self.config.tracking.run_dir

    def sampling(self) -> dict[str, str]:
        """Arguments of `tools/sample_rollouts.py` that shape its output."""
        objective, model = self.config.objective, self.config.model
        return {**SAMPLING, "temperature": str(objective.temperature), "dtype": model.dtype}


def gpu_count() -> int:
    """Number of NVIDIA GPUs that the driver lists; torch is not imported for it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def make_job(gpus: int) -> Job:
    """Two ranks without a GPU; otherwise a rank per GPU, two at most, in bfloat16 with float32 masters."""
    ranks = min(gpus, MOST_RANKS) or MOST_RANKS
    overrides = (f"parallel.cp={ranks}", "model.dtype=bfloat16", "zero.stage=1") if gpus else ()
    return Job(load_config(ROOT / CONFIG, overrides), overrides, ranks, gpus > 0)


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    print(f"\n== {title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - start:.1f} s", flush=True)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command of this Python in the repository, its output passed through.

    Raises:
        ValueError: it failed; its own message is on the console.
    """
    words = [sys.executable, *command]
    status = subprocess.run(words, cwd=ROOT, env={**os.environ, **(environment or {})}, check=False).returncode
    if status:
        raise ValueError(f"exit code {status} from: {' '.join(command)}")


def sample(job: Job) -> None:
    """Write prompts and rollouts, unless rollouts of these prompts, this model and these settings are there."""
    run(["tools/quickstart_prompts.py", "--out", str(job.prompts)])
    stamp_file = ROOT / job.rollouts.with_name("rollouts.stamp.json")
    rollouts = ROOT / job.rollouts
    wanted = {**job.sampling(), "prompts": digest(ROOT / job.prompts)}
    if stamp_file.is_file() and rollouts.is_file():
        if json.loads(stamp_file.read_text()) == {**wanted, "rollouts": digest(rollouts)}:
            print(f"{job.rollouts}: there already")
            return
    files = {"model": str(job.model), "prompts": str(job.prompts), "out": str(job.rollouts)}
    arguments = [word for name, value in {**files, **job.sampling()}.items() for word in (f"--{name}", value)]
    run(["tools/sample_rollouts.py", *arguments])
    stamp_file.write_text(json.dumps({**wanted, "rollouts": digest(rollouts)}, indent=1) + "\n")


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(job: Job, overrides: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    """Train into `run_dir`, which is made anew, through the launcher; returns the rows of its metrics."""
    shutil.rmtree(ROOT / run_dir, ignore_errors=True)
    words = ["-m", "deepspeed.launcher.runner", "--log_level", "warning"]
    words += ["--num_accelerators", str(job.ranks), "--master_port", str(free_port())]
    words += ["launch/train.py", "--config", str(CONFIG), *job.overrides, *overrides, f"tracking.run_dir={run_dir}"]
    run(words, launch_environment(job))
    metrics = ROOT / run_dir / METRICS_FILE
    rows = read_metrics(metrics) if metrics.is_file() else []
    if not rows:
        raise ValueError(f"training ended without a row in {run_dir}/{METRICS_FILE}")
    return rows


def launch_environment(job: Job) -> dict[str, str]:
    """What the launcher and its ranks need: the programs beside this Python, and the cores divided among the ranks."""
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if not job.gpu:
        cores = len(os.sched_getaffinity(0))
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // job.ranks))}
    return environment


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_result(job: Job, folder: Path) -> str:
    """Load the exported folder with transformers, compare its weights with the source's, and let it answer.

    Raises:
        ValueError: no weight changed, so nothing was trained.
    """
    import torch  # costs seconds, and training comes first
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(ROOT / job.model, dtype=torch.float32).state_dict()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    after = model.state_dict()
    changed = sum(not torch.equal(before[name], tensor) for name, tensor in after.items())
    if not changed:
        raise ValueError(f"{folder}: every weight equals that of {job.model}; no step moved the model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 3 plus 4? Answer with a number only."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return f"{changed} of {len(after)} weights changed; {chat[0]['content']!r} -> {answer!r}"


def outputs(job: Job) -> dict[str, Path]:
    """What a run leaves, by name.

    Raises:
        ValueError: something of it is missing.
    """
    patterns = {
        "metrics": METRICS_FILE,
        "W&B run (offline)": "wandb/offline-run-*",
        "schedule timeline": "schedule.png",
        "Hugging Face checkpoint": "checkpoints/**/config.json",
    }
    found = {name: sorted((ROOT / job.run_dir).glob(pattern)) for name, pattern in patterns.items()}
    missing = [f"{name} ({job.run_dir}/{patterns[name]})" for name, paths in found.items() if not paths]
    if missing:
        raise ValueError(f"training ended without {', '.join(missing)}")
    return {name: paths[-1].parent if paths[-1].name == "config.json" else paths[-1] for name, paths in found.items()}


def summary(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any]) -> list[str]:
    """What the metrics say, in lines."""
    logical = sum(row["perf/total_num_tokens"] for row in rows)
    executed = logical - sum(row["branch/shared_tokens"] for row in rows)
    seconds, dense_seconds = rows[0]["timing_s/step"], dense["timing_s/step"]
    rewards = ", ".join(f"{row['reward/mean']:.3f}" for row in rows)
    return [
        f"tokens        {logical:,.0f} in dense training, {executed:,.0f} computed (x{logical / executed:.1f} fewer)",
        f"first step    {seconds:.1f} s, dense {dense_seconds:.1f} s: x{dense_seconds / seconds:.2f} faster "
        f"(bound by FLOPs x{rows[0]['branch/speedup_bound']:.2f})",
        f"reward        {rewards} (mean per step; each step has other questions)",
    ]


def quickstart(job: Job) -> None:
    """All stages."""
    with stage(f"model: {job.model}"):
        run(["tools/quickstart_model.py", "--out", str(job.model)])
    with stage(f"rollouts: {job.rollouts}"):
        sample(job)
    with stage(f"training: {job.config.steps} steps on {job.ranks} ranks, {CONFIG}"):
        rows = train(job, (), job.run_dir)
    with stage("the first step again, dense"):
        dense = train(job, [f"{key}={value}" for key, value in DENSE.items()], job.dense_dir)
    found = outputs(job)
    with stage("the report"):
        run(["tools/report.py", str(job.run_dir)])
    with stage("the exported checkpoint in transformers"):
        print(load_result(job, found["Hugging Face checkpoint"]))
    print("\n== done")
    print("\n".join(summary(rows, dense[0])))
    for name, path in found.items():
        print(f"{name:<24}{path.relative_to(ROOT)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        quickstart(make_job(gpu_count()))
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
