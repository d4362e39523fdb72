"""Finds the checkpoint a run continues from, and refuses what is damaged or belongs to another run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.checkpoint import FORMAT, PREFIX, STATE_FILE, digest, steps_in
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.optimizer_parts import OptimizerParts
from megatron_branch.engine.tensor_layout import model_entries, shard

MASTERS = "masters"


@dataclass(frozen=True)
class Resume:
    """A whole checkpoint.

    Attributes:
        folder: where it is; every rank reads it.
        state: its `state.json`.
        skipped: newer ones that are damaged, as text; empty if none.
    """

    folder: Path
    state: dict[str, Any]
    skipped: str = ""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.state["step"])

    def load(self, model: nn.Module, arch: Architecture, groups: Groups, parts: OptimizerParts | None) -> None:
        """Fill this rank's weights, or once DeepSpeed has the model its masters and moments; reads only its slices."""
        parameters = dict(model.named_parameters())
        if parts is not None:
            parts.prepare(int(self.state["updates"]))
        kinds = (MASTERS,) if parts is None else (MASTERS, *parts.moments)
        for kind in kinds:
            files = {
                name: self.folder / file
                for file, entry in self.state["files"].items()
                if entry["kind"] == kind
                for name in entry["tensors"]
            }
            for entry in model_entries(arch, groups.pp.size):
                if entry.stage != groups.pp.rank:
                    continue
                parameter = parameters[entry.megatron]
                values = shard(entry, _reader(files), arch=arch, rank=groups.tp.rank, size=groups.tp.size)
                if parts is None:
                    with torch.no_grad():
                        parameter.copy_(values)
                else:
                    parts.write(parameter, values.to(parameter.device), None if kind == MASTERS else kind)


def _reader(files: dict[str, Path]) -> Any:
    def read(name: str, rows: slice, columns: slice) -> Tensor:
        with safe_open(files[name], framework="pt") as opened:
            part = opened.get_slice(name)
            return part[rows] if len(part.get_shape()) == 1 else part[rows, columns]

    return read


def identity(config: Config, arch: Architecture) -> dict[str, Any]:
    """What must be the same when a run goes on; the layout and the ZeRO stage need not."""
    data = config.data
    return {
        "model": json.loads(json.dumps(asdict(arch), default=str)),
        "model.dtype": config.model.dtype,
        "optimizer.name": config.optimizer.name,
        "optimizer.momentum": bool(config.optimizer.momentum),
        "data.rollouts": {"bytes": data.rollouts.stat().st_size, "sha256": digest(data.rollouts)},
        "data": {key: getattr(data, key) for key in ("groups_per_step", "shuffle", "seed", "max_tokens")},
        "seed": config.seed,
    }


def find_resume(config: Config, arch: Architecture) -> Resume | None:
    """The checkpoint to continue from, looked for and checked by rank 0 (collective); None: from the start.

    Args:
        config: the run.
        arch: of its model.

    Raises:
        ValueError: there is none, it is damaged, or another run wrote it; on every rank.
    """
    if config.checkpoint.resume is None:
        return None
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_find(config, identity(config, arch))]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    return answer[0]


def _find(config: Config, own: dict[str, Any]) -> Resume | None:
    wanted = config.checkpoint.resume
    folder = config.tracking.run_dir / "checkpoints" if wanted == "auto" else Path(str(wanted)).absolute().parent
    steps = steps_in(folder)
    if wanted == "auto":
        candidates = [folder / f"{PREFIX}{step}" for step in reversed(steps)]
    else:
        named = Path(str(wanted))
        number = named.name.removeprefix(PREFIX)
        earlier = [step for step in reversed(steps) if number.isdigit() and step < int(number)]
        candidates = [named, *(folder / f"{PREFIX}{step}" for step in earlier)]
    faults: list[str] = []
    for candidate in candidates:
        try:
            state = verify(candidate)
        except ValueError as error:
            faults.append(str(error))
            if config.checkpoint.on_damaged == "error":
                raise ValueError(
                    f"checkpoint.resume = {wanted}: {error}; name another one, or set "
                    "checkpoint.on_damaged=previous to go on from the newest whole one before it"
                ) from None
            continue
        _refuse_other(candidate, state["identity"], own)
        return Resume(candidate, state, "; ".join(faults))
    if faults:
        raise ValueError(f"checkpoint.resume = {wanted}: no whole checkpoint: {'; '.join(faults)}; restore one")
    return None


def verify(folder: Path) -> dict[str, Any]:
    """Read `state.json`, and compare every file with it.

    Raises:
        ValueError: incomplete or damaged; the message names the file.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        files = state["files"]
        if state["format"] != FORMAT:
            raise ValueError(f"{path}: format {state['format']}, this version reads {FORMAT}")
    except FileNotFoundError:
        raise ValueError(f"{folder} is no complete checkpoint: it has no {STATE_FILE}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, {STATE_FILE} says {entry['bytes']}")
        if digest(file) != entry["sha256"]:
            raise ValueError(f"{file} is damaged: its checksum is not that in {STATE_FILE}")
    return state


def _refuse_other(folder: Path, theirs: dict[str, Any], own: dict[str, Any]) -> None:
    for key, value in own.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"checkpoint {folder} was written with {key} = {json.dumps(theirs.get(key))}, this run has "
                f"{json.dumps(value)}; set it back, or begin a new run in another tracking.run_dir"
            )
