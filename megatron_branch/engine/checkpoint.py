"""Checkpoints: a folder that is complete or absent.

`RUN/checkpoints/global_step_N/` is written under a temporary name, synced and renamed; then `latest` is moved to it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_branch.engine.deepspeed_host import DeepSpeedHost
from megatron_branch.engine.durable import sync

PREFIX = "global_step_"


def save_checkpoint(host: DeepSpeedHost, folder: Path, *, step: int, state: dict[str, Any], keep: int | None) -> Path:
    """Write one checkpoint (collective).

    Args:
        host: weights, fp32 masters and moments.
        folder: `RUN/checkpoints`.
        step: optimizer steps taken.
        state: what a later run needs beside them: data position, random states, W&B id.
        keep: newest checkpoints to keep, and their exports; None keeps all.

    Returns:
        The checkpoint's folder.
    """
    name = f"{PREFIX}{step}"
    partial = f".{name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    host.save(folder, partial, state)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (folder / partial).rglob("*"):
            sync(path)
        for replaced in (folder / name, export_folder(folder / name)):
            shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder / partial, folder / name)
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
    return folder / name


def export_folder(checkpoint: Path) -> Path:
    """Where the Hugging Face export of a checkpoint stands; it goes when the checkpoint goes."""
    return checkpoint.with_name(f"{checkpoint.name}_hf")


def outdated(folder: Path, *, step: int, keep: int) -> list[Path]:
    """The checkpoints that go once that of `step` is written: all but the `keep` newest up to it.

    Later steps in the same folder are an earlier run's; they are neither counted nor removed.
    """
    found = [path.name.removeprefix(PREFIX) for path in folder.iterdir() if path.name.startswith(PREFIX)]
    steps = sorted(int(number) for number in found if number.isdigit() and int(number) <= step)
    return [folder / f"{PREFIX}{number}" for number in steps[:-keep]]
