"""Checkpoints: a folder that is complete or absent, independent of the layout that wrote it.

`RUN/checkpoints/global_step_N/` holds whole tensors under Hugging Face names, in safetensors files of at most about a
GiB: the masters (weights are their cast) and each of the optimizer's moments. `state.json` says what else a run needs,
and size and checksum of every file. It is written under a temporary name, synced and renamed; then `latest` is moved.

Neither Megatron's `dist_checkpointing` nor DeepSpeed's universal checkpoint is used: both unpickle what they load, and
that can run code; nothing here does. Random states are not kept: each step seeds from `seed` and its number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_branch.engine.durable import sync

PREFIX = "global_step_"
STATE_FILE = "state.json"
FORMAT = 1
_FILE_BYTES = 2**30

Kinds = Iterable[tuple[str, Iterator[tuple[str, Tensor]]]]


def save_checkpoint(kinds: Kinds, folder: Path, *, step: int, state: dict[str, Any], keep: int | None) -> Path:
    """Write one checkpoint (collective).

    Args:
        kinds: `masters` and each moment, with its tensors as `convert.gather_full` yields them.
        folder: `RUN/checkpoints`.
        step: optimizer steps taken.
        state: what a later run needs beside them, as plain values.
        keep: newest checkpoints to keep, and their exports; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: it cannot be written (on rank 0; its temporary folder is left out by every reader).
    """
    name = f"{PREFIX}{step}"
    target, partial = folder / name, folder / f".{name}.partial"
    writer = dist.get_rank() == 0
    if writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for kind, tensors in kinds:
        if writer:
            files |= _write(kind, tensors, partial)
        else:
            for _ in tensors:
                pass
    if writer:
        content = {"format": FORMAT, "step": step, **state, "files": files}
        (partial / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        sync(partial / STATE_FILE)
        sync(partial)
        for replaced in (target, export_folder(target)):
            shutil.rmtree(replaced, ignore_errors=True)
        os.rename(partial, target)
        pointer = folder / ".latest.partial"
        pointer.write_text(name + "\n", encoding="utf-8")
        sync(pointer)
        os.replace(pointer, folder / "latest")
        sync(folder)
        if keep is not None:
            for old in outdated(folder, step=step, keep=keep):
                shutil.rmtree(old)
                shutil.rmtree(export_folder(old), ignore_errors=True)
    dist.barrier()
    return target


def _write(kind: str, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> dict[str, dict[str, Any]]:
    """The files of one kind, each with its size, checksum and names; never more than one file's tensors in memory."""
    files: dict[str, dict[str, Any]] = {}
    held: dict[str, Tensor] = {}

    def flush() -> None:
        path = folder / f"{kind}-{len(files) + 1:05d}.safetensors"
        save_file(held, path)
        path.chmod(0o666 & ~_umask_of(folder))
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path), "kind": kind, "tensors": list(held)}
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.cpu().contiguous().clone()
        if sum(each.nbytes for each in held.values()) >= _FILE_BYTES:
            flush()
    if held:
        flush()
    return files


def _umask_of(folder: Path) -> int:
    """What the process's mask took from a folder that it made; safetensors makes files that only the owner reads."""
    return ~folder.stat().st_mode & 0o777


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def export_folder(checkpoint: Path) -> Path:
    """Where the Hugging Face export of a checkpoint stands; it goes when the checkpoint goes."""
    return checkpoint.with_name(f"{checkpoint.name}_hf")


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order."""
    found = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return sorted(int(number) for number in found if number.isdigit())


def outdated(folder: Path, *, step: int, keep: int) -> list[Path]:
    """The checkpoints that go once that of `step` is written: all but the `keep` newest up to it.

    Later steps in the same folder are an earlier run's; they are neither counted nor removed.
    """
    return [folder / f"{PREFIX}{number}" for number in [s for s in steps_in(folder) if s <= step][:-keep]]
