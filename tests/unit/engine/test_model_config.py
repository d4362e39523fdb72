"""Megatron's configuration: what it is told, and that norms keep the dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_branch.engine.architecture import Architecture, RopeSettings
from megatron_branch.engine.groups import Axis, Groups
from megatron_branch.engine.model_config import transformer_config

ARCH = Architecture(
    family="qwen3",
    layers=5,
    hidden=32,
    ffn=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=97,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    norm_eps=1e-4,
    rope=RopeSettings("default", 1e4),
    max_positions=64,
)


def groups(tp: int = 1, pp: int = 1) -> Groups:
    def axis(size: int) -> Axis:
        return Axis(size=size, rank=0, group=None, ranks=tuple(range(size)))  # type: ignore[arg-type]

    return Groups(
        dp=axis(1),
        cp=axis(1),
        tp=axis(tp),
        pp=axis(pp),
        dp_cp=axis(1),
        model=axis(tp * pp),
        embedding=None,
        ulysses=None,
        pass_q=None,
    )


def test_megatron_is_told_the_architecture() -> None:
    config = transformer_config(dataclasses.replace(ARCH, qkv_bias=True), groups(tp=2), torch.float64)
    expected = {
        "num_layers": 5,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-4,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "sequence_parallel": False,
    }
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_reaches_every_place(dtype: torch.dtype) -> None:
    config = transformer_config(ARCH, groups(), dtype)
    assert (config.params_dtype, config.pipeline_dtype, config.autocast_dtype) == (dtype, dtype, dtype)
    assert (config.bf16, config.fp16) == (dtype is torch.bfloat16, False)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16 is not supported: use one of float64, float32, bfloat16"):
        transformer_config(ARCH, groups(), torch.float16)


def test_layers_are_split_as_the_weights_are() -> None:
    layout = transformer_config(ARCH, groups(pp=4), torch.float32).pipeline_model_parallel_layout
    assert [[str(kind.name) for kind in stage[0]] for stage in layout.layout] == [
        ["embedding", "decoder", "decoder"],
        ["decoder"],
        ["decoder"],
        ["decoder", "loss"],
    ]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.pp=6"):
        transformer_config(ARCH, groups(pp=6), torch.float32)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.0693147180559945, 1.3])
def test_attention_multiplies_by_the_rope_factor(factor: float) -> None:
    rope = RopeSettings(
        "yarn", 1e4, (("attention_factor", factor), ("factor", 4.0), ("original_max_position_embeddings", 16))
    )
    config = transformer_config(dataclasses.replace(ARCH, rope=rope), groups(), torch.float64)
    # Two roundings of values near 1.
    assert _yarn_get_concentration_factor_from_config(config) == pytest.approx(factor, rel=5e-16)


def test_norm_stays_in_float64() -> None:
    """With a float32 step inside, the error would be 1e-8 and more."""
    config = transformer_config(ARCH, groups(), torch.float64)
    norm = WrappedTorchNorm(config, 32, eps=config.layernorm_epsilon).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-4).sqrt() * norm.weight
    assert norm(x).dtype == torch.float64
    assert float((norm(x) - expected).abs().max()) < 1e-14


def test_norm_in_bfloat16_rounds_once() -> None:
    """It computes in float32 and rounds the result: the best bfloat16 can do."""
    config = transformer_config(ARCH, groups(), torch.bfloat16)
    norm = WrappedTorchNorm(config, 32, eps=config.layernorm_epsilon).bfloat16()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 32, generator=generator).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-4).sqrt() * norm.weight.double()
    assert float(((norm(x).double() - exact) / exact).abs().max()) <= 2**-8
