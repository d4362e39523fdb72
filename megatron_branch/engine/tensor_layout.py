"""How Hugging Face tensors become the shards of Megatron parameters, and back.

Pure functions of the table in `families`; nothing here communicates.

Always true:
- `merge(entry, [shard(entry, ..., r) for r in ranks])` returns the tensors bit for bit;
- every Hugging Face tensor of the model is in exactly one entry that is not a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_branch.engine.architecture import Architecture, TransformersModules, stage_layers
from megatron_branch.engine.families import FAMILIES, Kind, Row

Read = Callable[[str, slice, slice], Tensor]
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of one pipeline stage.

    Attributes:
        megatron: its name in that stage's model.
        kind: its layout, see `families`.
        stage: the pipeline stage that holds it.
        names: Hugging Face tensors that it holds.
        shapes: their shapes.
        copy: the last stage's copy of a tied embedding, whose original is on the first stage.
    """

    megatron: str
    kind: Kind
    stage: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    copy: bool = False


def model_entries(arch: Architecture, pp: int) -> tuple[Entry, ...]:
    """All parameters of the model, split over `pp` stages, in Hugging Face's order."""
    if arch.transformers is not None:
        return _transformers_entries(arch.transformers)
    rows = FAMILIES[arch.family].rows
    entries = [_entry(arch, row, 0) for row in rows if row.place == "embedding"]
    first = 0
    for stage, layers in enumerate(stage_layers(arch, pp)):
        for local in range(layers):
            entries += [_entry(arch, row, stage, local, first + local) for row in rows if row.place == "layer"]
        first += layers
    entries += [_entry(arch, row, pp - 1) for row in rows if row.place == "norm"]
    head = next(row for row in rows if row.place == "head")
    if not arch.tied:
        entries.append(_entry(arch, head, pp - 1))
    elif pp > 1:
        embedding = entries[0]
        entries.append(
            Entry(head.megatron, embedding.kind, pp - 1, embedding.names, embedding.shapes, copy=True),
        )
    return tuple(entries)


def head_name(arch: Architecture) -> str:
    """Hugging Face's name of the output projection; tied models have no such tensor of their own."""
    if arch.transformers is not None:
        return arch.transformers.head
    return next(row for row in FAMILIES[arch.family].rows if row.place == "head").parts[0].name


def _transformers_entries(modules: TransformersModules) -> tuple[Entry, ...]:
    """Parameters of `TransformersModel`, which has the Hugging Face model as its child `hf`."""
    return tuple(
        Entry(f"hf.{name}", "vocab" if name == modules.embedding else "replicated", 0, (name,), (shape,))
        for name, shape in modules.parameters
    )


def shard(entry: Entry, read: Read, *, arch: Architecture, rank: int, size: int) -> Tensor:
    """The part of a parameter that tensor-parallel rank `rank` of `size` holds.

    Args:
        entry: which parameter.
        read: `read(name, rows, columns)` gives (part of) a Hugging Face tensor; only what is needed is asked for.
    """
    if entry.kind == "replicated":
        return read(entry.names[0], _ALL, _ALL)
    if entry.kind == "row":
        return read(entry.names[0], _ALL, _share(entry.shapes[0][1], rank, size))
    if entry.kind == "vocab":
        return _vocab_shard(entry, read, rank, size)
    parts = [
        read(name, _share(shape[0], rank, size), _ALL) for name, shape in zip(entry.names, entry.shapes, strict=True)
    ]
    if entry.kind == "qkv":
        groups = arch.kv_heads // size
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)
    return torch.cat(parts)


def merge(entry: Entry, shards: Sequence[Tensor], *, arch: Architecture) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of a parameter (in the order of `entry.names`) from all its shards, by rank."""
    if entry.kind == "replicated":
        return (shards[0],)
    if entry.kind == "row":
        return (torch.cat(tuple(shards), dim=1),)
    if entry.kind == "vocab":
        return (torch.cat(tuple(shards))[: arch.vocab],)
    if entry.kind == "qkv":
        heads = (arch.heads // arch.kv_heads, 1, 1)
        grouped = torch.cat(tuple(shards)).reshape(arch.kv_heads, -1, *shards[0].shape[1:])
        parts = grouped.split([count * arch.head_dim for count in heads], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)
    chunks = [part.chunk(len(entry.names)) for part in shards]
    return tuple(torch.cat(pieces) for pieces in zip(*chunks, strict=True))


def shard_shape(entry: Entry, *, arch: Architecture, size: int) -> tuple[int, ...]:
    """Shape of one shard over `size` ranks."""
    rest = entry.shapes[0][1:]
    if entry.kind == "replicated":
        return entry.shapes[0]
    if entry.kind == "row":
        return (entry.shapes[0][0], rest[0] // size)
    if entry.kind == "vocab":
        return (arch.padded_vocab(size) // size, *rest)
    return (sum(shape[0] for shape in entry.shapes) // size, *rest)


def stage_elements(arch: Architecture, *, tp: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Per pipeline stage, the number of elements of each parameter of one tensor-parallel rank."""
    stages: list[list[int]] = [[] for _ in range(pp)]
    for entry in model_entries(arch, pp):
        stages[entry.stage].append(math.prod(shard_shape(entry, arch=arch, size=tp)))
    return tuple(tuple(elements) for elements in stages)


def _entry(arch: Architecture, row: Row, stage: int, local: int = 0, layer: int = 0) -> Entry:
    sizes = {
        "hidden": arch.hidden,
        "ffn": arch.ffn,
        "vocab": arch.vocab,
        "q": arch.heads * arch.head_dim,
        "kv": arch.kv_heads * arch.head_dim,
        "head_dim": arch.head_dim,
    }
    return Entry(
        row.megatron.format(layer=local),
        row.kind,
        stage,
        tuple(part.name.format(layer=layer) for part in row.parts),
        tuple(tuple(sizes[symbol] for symbol in part.shape) for part in row.parts),
    )


def _share(length: int, rank: int, size: int) -> slice:
    assert length % size == 0  # check_layout
    return slice(rank * (length // size), (rank + 1) * (length // size))


def _vocab_shard(entry: Entry, read: Read, rank: int, size: int) -> Tensor:
    vocab = entry.shapes[0][0]
    each = -(-vocab // size)
    start, end = min(rank * each, vocab), min((rank + 1) * each, vocab)
    rows = read(entry.names[0], slice(start, end), _ALL)
    return torch.cat([rows, rows.new_zeros(each - (end - start), *rows.shape[1:])])
