"""Megatron's configuration of an architecture."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer import TransformerConfig

from megatron_branch.engine.architecture import Architecture, check_layout, stage_layers
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.rope import inverse_frequencies

DTYPES: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    arch: Architecture, groups: Groups, dtype: torch.dtype, *, sequence_parallel: bool = False
) -> TransformerConfig:
    """Configuration of this rank's stage.

    Parameters are left uninitialised: `convert.load_weights` fills each of them. Megatron makes its norms in torch's
    default dtype, so the model must be moved to `dtype` after it is built.

    `context_parallel_size` stays 1 because our core attention does context parallelism itself.

    Raises:
        ValueError: the model cannot be split this way, or `dtype` is none of `DTYPES`.
    """
    check_layout(arch, tp=groups.tp.size, pp=groups.pp.size)
    if dtype not in DTYPES.values():
        raise ValueError(f"model.dtype = {dtype} is not supported: use one of {', '.join(DTYPES)}")
    config = TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rotary_interleaved=False,
        # Fusions need Transformer Engine or apex, or accept no float64.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        params_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=groups.tp.size,
        pipeline_model_parallel_size=groups.pp.size,
        pipeline_model_parallel_layout=_stages(arch, groups.pp.size),
        pipeline_dtype=dtype,
        context_parallel_size=1,
        sequence_parallel=sequence_parallel,
    )
    _set_rope_factor(config, inverse_frequencies(arch.rope, arch.head_dim)[1])
    return config


def _stages(arch: Architecture, pp: int) -> list[list[str]] | None:
    if pp == 1:
        return None
    stages = [["decoder"] * layers for layers in stage_layers(arch, pp)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _set_rope_factor(config: TransformerConfig, factor: float) -> None:
    """Make Megatron's attention multiply cosine and sine by `factor`.

    It reads three fields that exist only once they are set, and computes (0.1 m ln s + 1) / (0.1 n ln s + 1) from
    them; s = exp(10), m = factor - 1, n = 0 gives the factor.
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.exp(10.0)
        config.yarn_mscale = factor - 1.0
        config.yarn_mscale_all_dim = 0.0
