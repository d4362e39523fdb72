"""Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.durable import sync
from megatron_branch.engine.families import FAMILIES
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.hf_source import Source
from megatron_branch.engine.tensor_layout import model_entries

_SHARD_BYTES = 5 * 10**9
# Whatever of these the source has is copied: the tokenizer, and how to sample.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def export_hf(
    model: nn.Module,
    arch: Architecture,
    groups: Groups,
    folder: str | Path,
    *,
    source: Source,
    dtype: torch.dtype,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Gather the weights and write config, safetensors and the source's tokenizer. All ranks call it together.

    Global rank 0 writes to a temporary name beside `folder`, syncs it and renames it, so a folder of that name is
    always complete. The vocabulary is written unpadded, tied weights once.

    Args:
        model: this rank's shard, every parameter whole on its rank.
        folder: where to; must not exist.
        source: the model that was loaded: its settings and tokenizer.
        dtype: of the written weights.
        shard_bytes: largest weights file, in bytes (a single larger tensor makes a larger file).

    Raises:
        ValueError: `folder` exists (on every rank).
    """
    weights = gather_full(model, arch, groups, lambda name, parameter: parameter, dtype=dtype)
    export_tensors(weights, arch, groups, folder, source=source, dtype=dtype, shard_bytes=shard_bytes)


def export_tensors(
    weights: Iterator[tuple[str, Tensor]],
    arch: Architecture,
    groups: Groups,
    folder: str | Path,
    *,
    source: Source,
    dtype: torch.dtype,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """`export_hf` of weights that somebody else gathers, for a host that partitions parameters (ZeRO-3).

    Args:
        weights: as `convert.gather_full` yields them, in `dtype`; every rank iterates to the end.
    """
    target = Path(folder)
    writer = dist.get_rank() == 0
    _agree(not writer or not target.exists(), target)
    if not writer:
        for _ in weights:
            pass
        dist.barrier()
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_weights(weights, arch, partial, dtype, shard_bytes)
    config = copy.deepcopy(source.config)
    modules = arch.transformers
    config.architectures = [FAMILIES[arch.family].model_class if modules is None else modules.model_class]
    config.dtype = dtype
    config.save_pretrained(partial)
    _write_tokenizer(source, partial)
    for file in partial.glob("*.safetensors"):
        shutil.copymode(partial / "config.json", file)  # safetensors makes files that only their owner may read
    for file in [*partial.iterdir(), partial]:
        sync(file)
    partial.rename(target)
    sync(target.parent)
    dist.barrier()


def _agree(free: bool, target: Path) -> None:
    """Every rank learns whether rank 0 may write, before any of them waits for it."""
    answer: list[object] = [free]
    dist.broadcast_object_list(answer, src=0)
    if not answer[0]:
        raise ValueError(f"export folder {target} exists; remove it or choose another")


def _write_weights(
    weights: Iterator[tuple[str, Tensor]], arch: Architecture, folder: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    files = _plan_files(arch, dtype.itemsize, shard_bytes)
    last_of_file = {file: name for name, file in files.items()}
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        held[name] = tensor.cpu().contiguous()
        if last_of_file[files[name]] == name:
            save_file(held, folder / files[name], metadata={"format": "pt"})
            held = {}
    assert not held
    if len(last_of_file) > 1:
        sizes = (_elements(shape) for entry in model_entries(arch, 1) for shape in entry.shapes)
        index = {"metadata": {"total_size": sum(sizes) * dtype.itemsize}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_files(arch: Architecture, itemsize: int, shard_bytes: int) -> dict[str, str]:
    """File of each tensor, in the order in which they are gathered."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for entry in model_entries(arch, 1):
        for name, shape in zip(entry.names, entry.shapes, strict=True):
            size = _elements(shape) * itemsize
            if filled and filled + size > shard_bytes:
                number, filled = number + 1, 0
            numbers[name] = number
            filled += size
    if number == 1:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{part:05d}-of-{number:05d}.safetensors" for name, part in numbers.items()}


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _write_tokenizer(source: Source, folder: Path) -> None:
    if source.gguf_file is not None:
        AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file).save_pretrained(folder)
        return
    for name in _COPIED:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
