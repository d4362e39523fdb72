"""What a user can get wrong is refused in one clear message, by rank 0 alone, before Megatron is imported.

Every case runs as rank 0 and as rank 1 in a fresh process that never gets further than the checks; a few run through
the launcher, where the exit code and the processes left behind matter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch.job import ROOT, run_job
from tests.tiny import write_tiny_model

ROWS: list[dict[str, Any]] = [
    {"group_id": "g", "token_ids": [5, 6, 7, 8, 9], "prompt_length": 2, "reward": reward} for reward in (0.0, 1.0)
]
VOCABULARY = 97
LAYERS = 2


@dataclass(frozen=True)
class World:
    """Where the cases find their files."""

    folder: Path

    def rows(self, **changes: Any) -> str:
        """An override that names a file of two rows, the second one changed; None removes a field."""
        last = {**ROWS[1], **changes}
        rows = [ROWS[0], {field: value for field, value in last.items() if value is not None}]
        return self.file("rows", "".join(json.dumps(row) + "\n" for row in rows))

    def file(self, stem: str, text: str) -> str:
        """An override that names a rollouts file of this text."""
        path = self.folder / f"{stem}{abs(hash(text))}.jsonl"
        path.write_text(text)
        return f"data.rollouts={path}"

    def model(self, name: str, *files: str) -> str:
        """An override that names a folder with these (empty) files beside the good model's config, if asked for."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for file in files:
            content = (self.folder / "model" / file).read_bytes() if file == "config.json" else b""
            (folder / file).write_bytes(content)
        return f"model.path={folder}"

    def deepspeed(self, **content: Any) -> tuple[str, str]:
        """A DeepSpeed file, as options."""
        path = self.folder / f"ds{'_'.join(content)}.json"
        path.write_text(json.dumps(content))
        return "--deepspeed_config", str(path)


Case = tuple[Callable[[World], tuple[str, ...]], tuple[str, ...]]
NAN = float("nan")

# What is wrong (as arguments after --config) and what the message must hold: where, value, rule, remedy.
CASES: dict[str, Case] = {
    "ranks that the sizes do not give": (
        lambda w: ("parallel.dp=2", "parallel.cp=2"),
        ("dp=2 pp=1 cp=2 tp=1", "multiply to 4", "started 2 ranks", "set parallel.dp=1 or launch 4 ranks"),
    ),
    "ranks that the sizes do not divide": (
        lambda w: ("parallel.cp=3",),
        ("cp=3", "does not divide the 2 ranks", "launch a multiple of 3 or change a size"),
    ),
    "more stages than layers": (
        lambda w: (f"parallel.pp={LAYERS}", f"model.path={w.folder / 'one_layer'}"),
        (f"parallel.pp={LAYERS}", "the model's 1 layer", "set parallel.pp to 1"),
    ),
    "more tensor-parallel ranks than key-value heads": (
        lambda w: ("parallel.tp=2", f"model.path={w.folder / 'one_kv_head'}"),
        ("parallel.tp=2", "1", "set parallel.tp"),
    ),
    "empty file": (lambda w: (w.file("empty", ""),), ("empty", "no rollouts", "write one JSON object per line")),
    "no such file": (lambda w: ("data.rollouts=absent.jsonl",), ("absent.jsonl", "No such file", "name a readable")),
    "half a row": (lambda w: (w.file("half", '{"group_id": 1,\n'),), (":1:", "not valid JSON", "write one JSON")),
    "token outside the vocabulary": (
        lambda w: (w.rows(token_ids=[5, 6, VOCABULARY, 8, 9]),),
        (":2:", "token_ids[2] = 97", "below the vocabulary size 97", "write the ids of the tokenizer"),
    ),
    "mask shorter than ids": (
        lambda w: (w.rows(loss_mask=[0, 0, 1], prompt_length=None),),
        (":2:", "loss_mask has 3 entries", "one entry per token of token_ids, which has 5", "write them all"),
    ),
    "no reward": (lambda w: (w.rows(reward=None),), (":2:", "reward is missing", 'add "reward": NUMBER')),
    "NaN log-prob": (
        lambda w: (w.rows(logprobs=[None, None, -0.1, NAN, -0.1]),),
        (":2:", "logprobs[3] is null or NaN", "finite and <= 0 on a trained token", "set the token's mask to 0"),
    ),
    "positive log-prob": (
        lambda w: (w.rows(logprobs=[None, None, -0.1, 0.5, -0.1]),),
        (":2:", "logprobs[3] = 0.5", "finite and <= 0 on a trained token", "set the token's mask to 0"),
    ),
    "nothing trained": (
        lambda w: (w.file("untrained", json.dumps({**ROWS[0], "prompt_length": 5}) + "\n"),),
        ("untrained", "step 1 (groups g)", "every loss mask is 0", "give the rows a loss mask"),
    ),
    "KL without a reference": (
        lambda w: ("objective.kl_coefficient=0.1",),
        (":1:", "ref_logprobs is missing", "objective.kl_coefficient=0.1", "add them or set"),
    ),
    "more steps than the data gives": (
        lambda w: ("steps=5",),
        ("steps=5", "gives 1 step: 1 group, data.groups_per_step=8", "lower steps"),
    ),
    "unknown key": (
        lambda w: ("branch.chunk_token=8",),
        ("c.yaml", "branch.chunk_token: unknown key", "chunk_tokens?"),
    ),
    "value of another type": (lambda w: ("parallel.tp=two",), ("c.yaml", 'parallel.tp = "two"', "valid integer")),
    "unknown option": (lambda w: ("--chunk", "8"), ("--chunk", "see --help")),
    "option of a dry run": (lambda w: ("--world_size", "2"), ("--world_size=2", "--dry_run")),
    "dry run of no ranks": (
        lambda w: ("--dry_run", "--world_size", "0"),
        ("--world_size=0", "at least 1", "leave it out"),
    ),
    "no model folder": (lambda w: ("model.path=absent",), ("model.path = absent", "not a folder", "give a folder")),
    "folder without config": (lambda w: (w.model("bare"),), ("bare", "no config.json", "give a Hugging Face model")),
    "pickled weights": (
        lambda w: (w.model("pickled", "config.json", "pytorch_model.bin"),),
        ("pickled", "*.bin", "save_pretrained"),
    ),
    "folder without weights": (
        lambda w: (w.model("no_weights", "config.json"),),
        ("no_weights", "neither model.safetensors", "give a complete"),
    ),
    "tensors of another size": (
        lambda w: (w.model("torn", "config.json", "model.safetensors"),),
        ("model.safetensors", "not a readable safetensors file", "download it again"),
    ),
    "ZeRO-3 with stages": (
        lambda w: ("zero.stage=3", "parallel.pp=2"),
        ("zero.stage=3", "parallel.pp=2", "set zero.stage to 2 or less, or parallel.pp=1"),
    ),
    "ZeRO-3 of the DeepSpeed file with stages": (
        lambda w: (*w.deepspeed(zero_optimization={"stage": 3}), "parallel.pp=2"),
        (".json", "zero.stage=3", "set zero.stage to 2 or less"),
    ),
    "reduction in every pass of whole gradients": (
        lambda w: ("zero.stage=1", "zero.reduce=pass"),
        ("zero.reduce=pass", "zero.stage=1", "set zero.stage to 2 or 3"),
    ),
    "accumulation by DeepSpeed": (
        lambda w: w.deepspeed(gradient_accumulation_steps=4),
        (".json", "gradient_accumulation_steps = 4", "data.groups_per_step", "remove the key"),
    ),
    "W&B by DeepSpeed": (
        lambda w: w.deepspeed(wandb={"enabled": True}),
        (".json", "wandb = ", "tracking.wandb", "remove the key"),
    ),
    "misspelt key of DeepSpeed": (
        lambda w: w.deepspeed(zero_optimisation={"stage": 3}),
        (".json", "zero_optimisation", "did you mean zero_optimization?"),
    ),
    "section of DeepSpeed that is none": (
        lambda w: w.deepspeed(zero_optimization=True, bf16={}),
        (".json", "zero_optimization = true", "must be an object"),
    ),
    "run folder that is a file": (
        lambda w: (f"tracking.run_dir={w.folder / 'c.yaml'}/run",),
        ("tracking.run_dir", "c.yaml is not a folder", "choose another folder"),
    ),
    "optimizer without its device": (
        lambda w: ("optimizer.name=fused_adam",),
        ("optimizer.name=fused_adam", "needs a GPU", "set optimizer.name=adamw"),
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("bad")
    write_tiny_model(folder / "model", "qwen3", layers=LAYERS, vocab=VOCABULARY)
    write_tiny_model(folder / "one_layer", "qwen3", layers=1)
    write_tiny_model(folder / "one_kv_head", "qwen3", kv_heads=1)
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"rollouts": str(folder / "good.jsonl")},
        "tracking": {"run_dir": str(folder / "run")},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    return World(folder)


def call(script: str, arguments: list[list[str]], ranks: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    """See `in_process`; one entry for each list of arguments and rank."""
    runs = [{"rank": rank, "arguments": one} for one in arguments for rank in ranks]
    job = {"script": str(ROOT / script), "world_size": 2, "runs": runs}
    command = [sys.executable, str(Path(__file__).with_name("in_process.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=json.dumps(job), text=True, capture_output=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def said(world: World) -> dict[str, list[dict[str, Any]]]:
    """What rank 0 and rank 1 said in each case."""
    arguments = [["--config", str(world.folder / "c.yaml"), *make(world)] for make, _ in CASES.values()]
    found = call("launch/train.py", arguments, ranks=(0, 1))
    return {name: found[2 * at : 2 * at + 2] for at, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_one_message_before_anything_heavy_is_imported(name: str, said: dict[str, list[dict[str, Any]]]) -> None:
    first, second = said[name]
    assert first["code"] == second["code"] == 1, first["err"]
    assert first["out"] == second["out"] == ""
    assert first["err"].count("\n") == 1
    assert first["err"].startswith("train.py: ")
    for fragment in CASES[name][1]:
        assert fragment in first["err"]
    assert first["slept_s"] == 0
    # The other rank is there only if rank 0 did not end the job meanwhile.
    assert second["slept_s"] >= 5
    assert second["err"] == first["err"].replace("train.py: ", "train.py: rank 1: ")
    assert first["loaded"] == second["loaded"] == []


def test_all_faults_of_a_configuration_at_once(world: World) -> None:
    (found,) = call("launch/train.py", [["--config", str(world.folder / "c.yaml"), "steps=0", "parallel.tp=0"]])
    assert found["code"] == 1
    assert [line.partition(":")[0] for line in found["err"].splitlines()] == [
        "train.py",
        "  override 'parallel.tp=0'",
        "  override 'steps=0'",
    ]


def test_good_input_is_not_refused(world: World) -> None:
    (found,) = call("launch/train.py", [["--config", str(world.folder / "c.yaml"), "parallel.pp=2"]])
    assert (found["code"], found["out"], found["err"]) == (0, "training starts\n", "")


def test_dry_run_tells_of_trees_schedule_and_bytes(world: World) -> None:
    arguments = ["--config", str(world.folder / "c.yaml"), "--dry_run", "--world_size", "64", "parallel.pp=2"]
    ulysses = [*arguments, "parallel.cp=4", "parallel.cp_mode=ulysses", "parallel.ulysses_size=2"]
    found, exchanged = call("launch/train.py", [[*arguments, "parallel.cp=4"], ulysses])
    assert "cp 4 (Ulysses 2 x pass-Q 2), pp 2" in exchanged["out"]
    assert (found["code"], found["err"], found["loaded"]) == (0, "", [])
    lines = found["out"].splitlines()
    assert lines[0].startswith("topology  64 planned ranks: tp 1, cp 4, pp 2, dp 8; ZeRO 0")
    assert lines[1].startswith("trees     2 rollouts of 1 groups")
    stages = [line for line in lines if line.startswith(("stage 0   ", "stage 1   "))]
    assert stages == ["stage 0   T0.0> T0.0<", "stage 1   T0.0"]
    assert "steps in all: 1" in found["out"]
    assert lines[-1].startswith("state on the fullest rank, peak by kind: state ")


@pytest.mark.parametrize("name", ["ranks that the sizes do not give", "token outside the vocabulary"])
def test_a_launched_job_ends_with_one_message_and_no_process(name: str, world: World) -> None:
    make, fragments = CASES[name]
    job = run_job(world.folder / "c.yaml", *make(world), limit_s=90)
    assert job.code not in (0, None)
    messages = [line for line in job.err.splitlines() if line.startswith("train.py: ")]
    assert len(messages) == 1, job.err
    assert not messages[0].startswith("train.py: rank")
    assert all(fragment in messages[0] for fragment in fragments)
    assert "Traceback" not in job.err + job.out
    assert not job.left_behind


DUMP_CASES: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "token outside the vocabulary",
        "mask shorter than ids",
        "no reward",
        "NaN log-prob",
        "positive log-prob",
        "empty file",
        "no model folder",
        "pickled weights",
        "KL without a reference",
    )
} | {
    "more stages than layers": (
        lambda w: ("--pp", "2", f"model.path={w.folder / 'one_layer'}"),
        ("parallel.pp=2", "the model's 1 layer", "set parallel.pp to 1"),
    ),
    "Ulysses over ranks that do not divide the heads": (
        lambda w: ("--cp", "3", "--cp_mode", "ulysses"),
        ("parallel.cp_mode=ulysses over 3 ranks", "4 attention heads", "2 KV heads", "or parallel.cp_mode=pass_q"),
    ),
    "Ulysses groups that do not divide cp": (
        lambda w: ("--cp", "3", "--cp_mode", "ulysses", "parallel.ulysses_size=2"),
        ("parallel.ulysses_size=2", "does not divide parallel.cp=3", "set it to one of 1, 3"),
    ),
    "no such layout of attention": (
        lambda w: ("--cp_mode", "ring"),
        ("parallel.cp_mode", "ring", "'pass_q' or 'ulysses'"),
    ),
    "unknown key": (lambda w: ("branch.chunk=8",), ("branch.chunk: unknown key", "did you mean")),
    "key of training": (lambda w: ("optimizer.lr=1",), ("optimizer.lr has no effect", "remove it")),
    "no ranks": (lambda w: ("--dp", "0"), ("parallel.dp = 0", "greater than or equal to 1")),
    "ZeRO-3 with stages": (lambda w: ("--zero", "3", "--pp", "2"), ("zero.stage=3", "parallel.pp=2", "set zero.stage")),
    "reduction in every pass": (
        lambda w: ("--zero", "2", "--pp", "2", "--dp", "2", "zero.reduce=pass"),
        ("zero.reduce=pass", "parallel.pp=2", "parallel.dp=2", "set zero.reduce=step"),
    ),
    "ZeRO with float64": (lambda w: ("--zero", "1", "--dtype", "float64"), ("--zero 1", "float32", "leave one")),
    "nothing trained": (
        lambda w: (w.file("untrained", json.dumps({**ROWS[0], "prompt_length": 5}) + "\n"),),
        ("untrained", "every loss mask is 0", "give the rows a loss mask"),
    ),
    "folder to write to": (lambda w: ("--out", str(w.folder)), ("--out", "is a folder", "name a file")),
}


def test_dump_step_refuses_in_one_line(world: World) -> None:
    usual = ["--model", str(world.folder / "model"), "--rollouts", str(world.folder / "good.jsonl")]
    usual += ["--out", str(world.folder / "g.safetensors")]
    options = {"data.rollouts": "--rollouts", "model.path": "--model"}
    arguments = []
    for make, _ in DUMP_CASES.values():
        pairs = [word.partition("=") for word in make(world)]
        changed = [[options[key], value] if key in options else [key + sign + value] for key, sign, value in pairs]
        arguments.append([*usual, *(word for words in changed for word in words)])
    every = call("tools/dump_step.py", arguments)
    for (name, (_, fragments)), found in zip(DUMP_CASES.items(), every, strict=True):
        assert (found["code"], found["out"], found["loaded"]) == (1, "", []), (name, found)
        assert found["err"].count("\n") == 1, (name, found["err"])
        assert found["err"].startswith("dump_step: "), (name, found["err"])
        for fragment in fragments:
            assert fragment in found["err"], (name, found["err"])
    assert not (world.folder / "g.safetensors").exists()
