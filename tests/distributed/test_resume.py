"""A run that stops and goes on is the run that did not stop, bit for bit; under another layout, to rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_branch.config import make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model, check_run_dir
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.resume import verify
from megatron_branch.engine.trainer import Trainer
from megatron_branch.rollouts.synthetic import odd_rollouts
from megatron_branch.tracking.jsonl import read_metrics
from tests.harness import RankError, run_ranks
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout

STEPS = [odd_rollouts(97, seed)[:6] for seed in range(4)]
ADAMW = {"name": "adamw", "lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.3, "schedule": "cosine"}
MOMENTUM = {"name": "sgd", "lr": 0.2, "momentum": 0.9}


@dataclass(frozen=True)
class Leg:
    """A process's share of a run, under `place/name`: tp, pp, dp, ZeRO stage, and what else differs."""

    name: str
    layout: tuple[int, int, int] = (1, 1, 2)
    stage: int = 0
    dtype: str = "float32"
    resume: str | None = None
    optimizer: str = "adamw"
    on_damaged: str = "error"

    def config(self, place: Path) -> Any:
        tp, pp, dp = self.layout
        return make_config(
            {
                "model": {"path": str(place / "model"), "dtype": self.dtype},
                "data": {"rollouts": str(place / "rollouts.jsonl")},
                "parallel": {"tp": tp, "pp": pp, "dp": dp},
                "branch": {"chunk_tokens": 16, "gate": False},
                "optimizer": ADAMW if self.optimizer == "adamw" else MOMENTUM,
                "zero": {"stage": self.stage},
                "checkpoint": {"every_steps": 2, "resume": self.resume, "on_damaged": self.on_damaged},
                "tracking": {"run_dir": str(place / self.name)},
            }
        )


def train_all(legs: Sequence[Leg], place: Path) -> None:
    for leg in legs:
        tp, pp, dp = leg.layout
        groups = build_groups(dp=dp, cp=1, tp=tp, pp=pp)
        config = leg.config(place)
        device = host_cpu.enter()
        trainer = Trainer(config, check_model(config), groups=groups, device=device, deepspeed_content={})
        trainer.train(STEPS)
        trainer.host.engine.destroy()
        leave_layout()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_tiny_model(folder / "model", "qwen3", tied=True)
    (folder / "rollouts.jsonl").write_text("the rollouts are given; this stands for their file\n")
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by kind and name."""
    found = {}
    for name, entry in verify(folder)["files"].items():
        found |= {f"{entry['kind']} {key}": value for key, value in load_file(folder / name).items()}
    return found


def split(place: Path, name: str, to: str) -> None:
    """A folder as it was after step 2."""
    shutil.copytree(place / name, place / to)
    shutil.rmtree(place / to / "checkpoints" / "global_step_4")


def losses(place: Path, name: str) -> list[float]:
    return [row["actor/pg_loss"] for row in read_metrics(place / name / "metrics.jsonl")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_the_whole_one(place: Path, dtype: str) -> None:
    whole = [Leg(f"{dtype} {stage}", stage=stage, dtype=dtype) for stage in range(4)]
    whole.append(Leg(f"{dtype} momentum", stage=1, dtype=dtype, optimizer="sgd"))
    run_ranks(2, train_all, whole, place, timeout_s=200)
    again = [
        Leg(f"{leg.name} again", stage=leg.stage, dtype=dtype, optimizer=leg.optimizer, resume="auto") for leg in whole
    ]
    for one, other in zip(whole, again, strict=True):
        split(place, one.name, other.name)
    run_ranks(2, train_all, again, place, timeout_s=200)
    for one, other in zip(whole, again, strict=True):
        expected, got = (tensors(place / leg.name / "checkpoints" / "global_step_4") for leg in (one, other))
        middle = tensors(place / one.name / "checkpoints" / "global_step_2")
        assert expected.keys() == got.keys() == middle.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), (other, name)
            assert not torch.equal(tensor, middle[name]), name
        assert losses(place, one.name) == losses(place, other.name)
        assert len(losses(place, other.name)) == 4
    masters = tensors(place / whole[0].name / "checkpoints" / "global_step_4")
    rounded = all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())
    assert not rounded


def test_resharding(place: Path) -> None:
    """dp 2 to 1, tp 1 to 2, pp 2 to 1, ZeRO 1 to 3: the same losses and weights, to rounding."""
    run_ranks(2, train_all, [Leg("dp"), Leg("pp", (1, 2, 1)), Leg("z1", stage=1)], place, timeout_s=200)
    run_ranks(1, train_all, [Leg("tp", (1, 1, 1))], place, timeout_s=200)
    for name in ("dp", "pp", "z1", "tp"):
        split(place, name, f"{name} on")
    two = [Leg("tp on", (2, 1, 1), resume="auto"), Leg("z1 on", stage=3, resume="auto")]
    run_ranks(2, train_all, two, place, timeout_s=200)
    run_ranks(1, train_all, [Leg(f"{n} on", (1, 1, 1), resume="auto") for n in ("dp", "pp")], place, timeout_s=200)
    for name in ("dp", "pp", "z1", "tp"):
        assert losses(place, f"{name} on") == pytest.approx(losses(place, name), abs=1e-6, rel=1e-6), name
        expected, got = (tensors(place / n / "checkpoints" / "global_step_4") for n in (name, f"{name} on"))
        for key, tensor in expected.items():
            assert torch.allclose(tensor, got[key], rtol=1e-4, atol=1e-6), (name, key)


def test_what_cannot_be_resumed_is_refused(place: Path) -> None:
    first = Leg("bad", (1, 1, 1))
    run_ranks(1, train_all, [first], place, timeout_s=100)
    with pytest.raises(ValueError, match="another run's checkpoints; set checkpoint.resume=auto"):
        check_run_dir(first.config(place))
    newest = place / "bad" / "checkpoints" / "global_step_4"

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(RankError, match=match):
            run_ranks(1, train_all, [Leg("bad", (1, 1, 1), **{"resume": "auto", **changes})], place, timeout_s=100)

    refused("the checkpoint is of step 4, and the run has 4; raise steps")
    refused("was written with optimizer.name", optimizer="sgd")
    refused("was written with model.dtype", dtype="bfloat16")
    file = newest / "exp_avg-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="exp_avg-00001.safetensors is damaged: its checksum"):
        verify(newest)
    refused("exp_avg-00001.safetensors is damaged.*on_damaged=previous")
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="exp_avg-00001.safetensors has .* bytes"):
        verify(newest)
    file.unlink()
    with pytest.raises(ValueError, match="exp_avg-00001.safetensors is missing"):
        verify(newest)
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").unlink()
    with pytest.raises(ValueError, match="no complete checkpoint: it has no state.json"):
        verify(newest)
    back = Leg("bad", (1, 1, 1), resume="auto", on_damaged="previous")
    run_ranks(1, train_all, [back], place, timeout_s=100)
    assert verify(newest)["files"] == state["files"]
