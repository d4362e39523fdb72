"""What a model of any Hugging Face family is, for the Transformers host; what it would compute wrongly is refused here.

Read from the config and from the model's own modules on the meta device, so no weight is read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatron_branch.engine.architecture import (
    Architecture,
    RopeSettings,
    TransformersModules,
    positive_size,
    refuse_quantised_and_dropout,
)

# Positions turn by fixed frequencies: passes of one path see different lengths, and others depend on the length.
_ROPE = ("default", "linear", "llama3", "yarn")
_SOFT = ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ANOTHER = "use another model"


def transformers_architecture(config: PretrainedConfig, *, source: str) -> Architecture:
    """The sizes of a causal language model with full attention, and its parameters.

    Args:
        config: as transformers reads it.
        source: where it came from, for messages.

    Raises:
        ValueError: a setting asks for something that is not computed.
    """
    _refuse_settings(config, source)
    modules = _modules(config, source)
    shapes = dict(modules.parameters)
    heads = positive_size(config, "num_attention_heads", source)
    hidden = positive_size(config, "hidden_size", source)
    given_kv, given_dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    return Architecture(
        family=config.model_type,
        layers=positive_size(config, "num_hidden_layers", source),
        hidden=hidden,
        ffn=positive_size(config, "intermediate_size", source),
        heads=heads,
        kv_heads=heads if given_kv is None else given_kv,
        head_dim=hidden // heads if given_dim is None else given_dim,
        vocab=shapes[modules.embedding][0],
        tied=modules.head not in shapes,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=0.0,
        rope=RopeSettings(_rope_type(config), 0.0),
        max_positions=positive_size(config, "max_position_embeddings", source),
        transformers=modules,
    )


def _refuse_settings(config: PretrainedConfig, source: str) -> None:
    settings = config.to_dict()
    refuse_quantised_and_dropout(settings, source)
    for key in _SOFT:
        if settings.get(key) is not None:
            _refuse(source, key, settings[key], "attention and logits are plain here", _ANOTHER)
    for key in _EXPERTS:
        if (settings.get(key) or 0) > 1:
            _refuse(source, key, settings[key], "experts are not supported", _ANOTHER)
    window = settings.get("sliding_window")
    if window is not None and settings.get("use_sliding_window") is not False:
        _refuse(source, "sliding_window", window, "every layer must have full attention", "set it to null")
    kinds = sorted(set(settings.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        _refuse(source, "layer_types", kinds, "every layer must have full attention", _ANOTHER)
    rope = _rope_type(config)
    if rope not in _ROPE:
        rule = "frequencies must not depend on the length of a pass"
        _refuse(source, "rope_parameters.rope_type", rope, rule, f"use one of {', '.join(_ROPE)}")


def _rope_type(config: PretrainedConfig) -> str:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


def _modules(config: PretrainedConfig, source: str) -> TransformersModules:
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # transformers raises many kinds here, all of them about this config
        raise ValueError(
            f"{source}: transformers builds no causal language model of it: {error}; {_ANOTHER}"
        ) from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        _refuse(source, "model_type", config.model_type, "the head must be a linear layer without bias", _ANOTHER)
    if not type(model)._supports_attention_backend:
        rule = "its attention does not go through transformers' AttentionInterface"
        _refuse(source, "model_type", config.model_type, rule, _ANOTHER)
    if model.base_model is model:
        _refuse(source, "model_type", config.model_type, "it has no base model below its head", _ANOTHER)
    names = {id(module): name for name, module in model.named_modules()}
    return TransformersModules(
        model_class=type(model).__name__,
        parameters=tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
        embedding=f"{names[id(embedding)]}.weight",
        head=f"{names[id(head)]}.weight",
        logit_factor=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
    )


def _refuse(source: str, key: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ValueError(f"{source}: {key} = {value!r} is not supported with model.host=transformers: {rule}; {remedy}")
