"""Moves weights between Hugging Face's tensors and the shards of a Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.hf_source import Source
from megatron_branch.engine.tensor_layout import Entry, head_name, merge, model_entries, shard, shard_shape

if TYPE_CHECKING:  # groups imports Megatron, which the checks before a run do without
    from megatron_branch.engine.groups import Groups

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LISTED = 8


def check_source(source: Source, arch: Architecture) -> None:
    """Compare names and shapes with what the architecture has; reads no weights.

    A tied model may bring `lm_head.weight` too (some do); `load_weights` then compares it with the embedding.

    Raises:
        ValueError: tensors are missing, left over, or of another shape; it lists them.
    """
    expected = {
        name: shape for entry in model_entries(arch, 1) for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    names = {name for name in source.tensors.names() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tied:
        names.discard(head_name(arch))
    missing, left_over = sorted(expected.keys() - names), sorted(names - expected.keys())
    if missing or left_over:
        listed = _list("missing", missing) + _list("left over", left_over)
        raise ValueError(
            f"{source} does not hold the tensors of a {arch.family} model: {listed}"
            "give a checkpoint whose tensors and config.json belong together"
        )
    for name, shape in expected.items():
        if source.tensors.shape(name) != shape:
            raise ValueError(
                f"{source}: {name} has shape {list(source.tensors.shape(name))}, config.json says {list(shape)}; "
                "give a checkpoint whose tensors and config.json belong together"
            )


def load_weights(model: nn.Module, source: Source, arch: Architecture, groups: Groups) -> None:
    """Fill every parameter of this rank's shard, casting to the parameter's dtype; only the rank's own slices are read.

    Padding rows of the vocabulary become zeros.

    Raises:
        ValueError: see `check_source`; or a tensor is not floating point; or a tied model's `lm_head.weight` differs
            from its embedding.
    """
    check_source(source, arch)

    def read(name: str, rows: slice, columns: slice) -> Tensor:
        tensor = source.tensors.read(name, rows, columns)
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{source}: {name} has dtype {tensor.dtype}; use the unquantised model")
        return tensor

    unfilled = dict(model.named_parameters())
    dtypes = {parameter.dtype for parameter in unfilled.values()}
    assert len(dtypes) == 1, f"the model has parameters of several dtypes {dtypes}"
    for entry in model_entries(arch, groups.pp.size):
        if entry.stage != groups.pp.rank:
            continue
        parameter = unfilled.pop(entry.megatron)
        values = shard(entry, read, arch=arch, rank=groups.tp.rank, size=groups.tp.size)
        assert values.shape == parameter.shape, f"{entry.megatron}: {values.shape} into {parameter.shape}"
        if arch.tied and entry.kind == "vocab":
            _check_tied(entry, values, source, arch, groups)
        with torch.no_grad():
            parameter.copy_(values)
    assert not unfilled, f"parameters that the table of {arch.family} lacks: {sorted(unfilled)}"


def gather_full(
    model: nn.Module,
    arch: Architecture,
    groups: Groups,
    tensor_of: Callable[[str, nn.Parameter], Tensor],
    *,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Whole Hugging Face tensors, one Megatron parameter at a time, on global rank 0 only.

    Every rank must iterate to the end; the others get nothing. Tied weights come from the first stage, so a gradient
    must hold both stages' contributions there already; gradients of replicated parameters (norms) must be the same on
    all tensor-parallel ranks.

    Args:
        tensor_of: `tensor_of(name, parameter)` gives this rank's shard of whatever is gathered: the weight, its
            gradient, a moment. Called for each parameter in the same order on all ranks of a stage, so it may be
            collective over their data-parallel group.
        dtype: what is yielded (and sent).

    Yields:
        name and tensor, on the device of the parameters.
    """
    parameters = dict(model.named_parameters())
    writer = groups.model.ranks[0]
    for entry in model_entries(arch, groups.pp.size):
        if entry.copy:
            continue
        mine = None
        if entry.stage == groups.pp.rank:
            parameter = parameters[entry.megatron]
            mine = tensor_of(entry.megatron, parameter).detach().to(device=parameter.device, dtype=dtype).contiguous()
            assert mine.shape == shard_shape(entry, arch=arch, size=groups.tp.size), entry.megatron
        if groups.dp_cp.rank != 0:
            continue
        if dist.get_rank() == writer:
            device = next(iter(parameters.values())).device
            shards = _receive(entry, mine, arch=arch, groups=groups, empty=torch.empty(0, dtype=dtype, device=device))
            yield from zip(entry.names, merge(entry, shards, arch=arch), strict=True)
        elif mine is not None and (groups.tp.rank == 0 or entry.kind != "replicated"):
            dist.send(mine, dst=writer, group=groups.model.group)


def _receive(entry: Entry, mine: Tensor | None, *, arch: Architecture, groups: Groups, empty: Tensor) -> list[Tensor]:
    """All shards of a parameter, by tensor-parallel rank (of a replicated one only the first)."""
    senders = groups.model.ranks[entry.stage * groups.tp.size :][: 1 if entry.kind == "replicated" else groups.tp.size]
    shards = []
    for sender in senders:
        if sender == dist.get_rank():
            assert mine is not None
            shards.append(mine)
        else:
            buffer = empty.new_empty(shard_shape(entry, arch=arch, size=groups.tp.size))
            dist.recv(buffer, src=sender, group=groups.model.group)
            shards.append(buffer)
    return shards


def _check_tied(entry: Entry, embedding: Tensor, source: Source, arch: Architecture, groups: Groups) -> None:
    name = head_name(arch)
    if name not in source.tensors.names():
        return
    head = Entry(entry.megatron, entry.kind, entry.stage, (name,), entry.shapes)
    values = shard(head, source.tensors.read, arch=arch, rank=groups.tp.rank, size=groups.tp.size)
    if not torch.equal(values, embedding):
        raise ValueError(
            f"{source}: {name} differs from {entry.names[0]} though tie_word_embeddings is true; "
            "set tie_word_embeddings to false in config.json or remove the tensor"
        )


def _list(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{title}: {', '.join(names[:_LISTED])}{more}; "
