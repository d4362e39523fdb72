"""A model of any size with random weights, without a folder: for benchmarks."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from megatron_branch.engine.architecture import architecture_from_config
from megatron_branch.engine.hf_source import Source
from megatron_branch.engine.tensor_layout import model_entries

STD = 0.02


class _RandomTensors:
    """Normal weights, ones for norms; the same for the same name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)[rows]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return (torch.randn(shape, generator=generator) * STD)[rows, columns]


def random_source(
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> Source:
    """A Llama of these sizes, embeddings untied.

    Raises:
        ValueError: the sizes do not fit together.
    """
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=2**21,
    )
    arch = architecture_from_config(config, source="random model")
    shapes = {
        name: shape for entry in model_entries(arch, 1) for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    return Source(Path("random"), None, config, _RandomTensors(shapes))
