"""Shards and whole tensors: bitwise inverses, in Megatron's order, every tensor once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_branch.engine.architecture import Architecture, RopeSettings
from megatron_branch.engine.families import FAMILIES
from megatron_branch.engine.tensor_layout import Entry, Read, merge, model_entries, shard, shard_shape


def arch(family: str = "qwen2", *, tied: bool = False, layers: int = 3) -> Architecture:
    flags = FAMILIES[family]
    return Architecture(
        family=family,
        layers=layers,
        hidden=6,
        ffn=8,
        heads=8,
        kv_heads=4,
        head_dim=2,
        vocab=13,
        tied=tied,
        qkv_bias=flags.qkv_bias,
        qk_norm=flags.qk_norm,
        norm_eps=1e-6,
        rope=RopeSettings("default", 1e4),
        max_positions=64,
    )


def random_tensors(entry: Entry) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: torch.randn(s, generator=generator) for n, s in zip(entry.names, entry.shapes, strict=True)}


def reader(tensors: dict[str, Tensor]) -> Read:
    def read(name: str, rows: slice, columns: slice) -> Tensor:
        return tensors[name][rows] if tensors[name].ndim == 1 else tensors[name][rows, columns]

    return read


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_merge_undoes_shard(family: str, size: int) -> None:
    this = arch(family)
    for entry in model_entries(this, 1):
        tensors = random_tensors(entry)
        shards = [shard(entry, reader(tensors), arch=this, rank=rank, size=size) for rank in range(size)]
        for part in shards:
            assert part.shape == shard_shape(entry, arch=this, size=size), entry.megatron
        for name, tensor in zip(entry.names, merge(entry, shards, arch=this), strict=True):
            assert torch.equal(tensor, tensors[name]), name


def named(this: Architecture, megatron: str) -> Entry:
    return next(entry for entry in model_entries(this, 1) if entry.megatron == megatron)


def numbered(rows: int, start: int) -> Tensor:
    return torch.arange(start, start + rows).float()


def test_qkv_order_is_one_block_per_kv_group() -> None:
    """Each group: the rows of its two query heads, of its key head, of its value head (two rows each)."""
    this = arch()
    entry = named(this, "decoder.layers.0.self_attention.linear_qkv.bias")
    read = reader(dict(zip(entry.names, (numbered(16, 0), numbered(8, 100), numbered(8, 200)), strict=True)))
    groups = [
        [4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3, 100 + 2 * g, 101 + 2 * g, 200 + 2 * g, 201 + 2 * g] for g in range(4)
    ]
    for size in (1, 2, 4):
        for rank in range(size):
            mine = groups[rank * 4 // size : (rank + 1) * 4 // size]
            assert shard(entry, read, arch=this, rank=rank, size=size).tolist() == [x for group in mine for x in group]


def test_gate_comes_before_up_in_each_shard() -> None:
    this = arch()
    entry = named(this, "decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = numbered(8, 0)[:, None].expand(8, 6), numbered(8, 100)[:, None].expand(8, 6)
    read = reader(dict(zip(entry.names, (gate, up), strict=True)))
    assert shard(entry, read, arch=this, rank=1, size=2)[:, 0].tolist() == [4, 5, 6, 7, 104, 105, 106, 107]


@pytest.mark.parametrize(
    ("size", "rank", "rows"),
    [(1, 0, range(13)), (2, 1, [*range(7, 13), 0]), (4, 3, [12, 0, 0, 0]), (8, 6, [12, 0]), (8, 7, [0, 0])],
)
def test_vocabulary_rows_are_padded_with_zeros(size: int, rank: int, rows: list[int]) -> None:
    this = arch()
    entry = named(this, "embedding.word_embeddings.weight")
    read = reader({entry.names[0]: numbered(13, 0)[:, None].expand(13, 6)})
    assert shard(entry, read, arch=this, rank=rank, size=size)[:, 0].tolist() == list(rows)


def test_only_the_needed_rows_are_read() -> None:
    this = arch()
    asked: list[tuple[slice, slice]] = []

    def recording(read: Read) -> Callable[[str, slice, slice], Tensor]:
        def record(name: str, rows: slice, columns: slice) -> Tensor:
            asked.append((rows, columns))
            return read(name, rows, columns)

        return record

    for megatron in ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"):
        entry = named(this, f"decoder.layers.0.{megatron}")
        shard(entry, recording(reader(random_tensors(entry))), arch=this, rank=3, size=4)
    assert asked == [
        (slice(12, 16), slice(None)),
        (slice(6, 8), slice(None)),
        (slice(6, 8), slice(None)),
        (slice(None), slice(12, 16)),
    ]


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_in_one_entry(tied: bool, pp: int) -> None:
    entries = model_entries(arch(tied=tied), pp)
    names = [name for entry in entries if not entry.copy for name in entry.names]
    assert len(names) == len(set(names)) == 3 * 12 + (2 if tied else 3)
    assert ("lm_head.weight" in names) != tied
    places = [(entry.stage, entry.megatron) for entry in entries]
    assert len(places) == len(set(places))


def test_layers_are_numbered_within_their_stage() -> None:
    entries = model_entries(arch(layers=3), 2)
    found = {(entry.stage, entry.megatron, entry.names[0]) for entry in entries if "input_layernorm" in entry.megatron}
    assert found == {
        (0, "decoder.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        (0, "decoder.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        (1, "decoder.layers.0.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
    }


def test_a_tied_embedding_has_a_copy_on_the_last_stage_only_with_several_stages() -> None:
    def copies(this: Architecture, pp: int) -> list[tuple[int, str, str]]:
        return [(entry.stage, entry.megatron, entry.names[0]) for entry in model_entries(this, pp) if entry.copy]

    assert copies(arch(tied=True), 1) == copies(arch(), 2) == []
    assert copies(arch(tied=True), 3) == [(2, "output_layer.weight", "model.embed_tokens.weight")]
