"""The supported model families: one declarative table of parameters each.

A row says which Hugging Face tensors make up one Megatron parameter and how that parameter is laid out over tensor
parallelism. Adding a family is adding rows.

Shapes are written in symbols: `hidden`, `ffn`, `vocab`, `q` (heads x head_dim), `kv` (kv_heads x head_dim), `head_dim`.
In names `{layer}` is the layer's number: over the whole model in Hugging Face's names, within its stage in Megatron's.

Kinds:
    replicated  the same on every tensor-parallel rank
    column      split along dimension 0
    row         split along dimension 1
    qkv         q, k, v; per KV group its query rows, its key rows, its value rows; split between groups
    gate_up     gate, up; each split along dimension 0, this rank's gate rows before its up rows
    vocab       rows padded with zeros to a multiple of the ranks, then split along dimension 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["replicated", "column", "row", "qkv", "gate_up", "vocab"]
Place = Literal["embedding", "layer", "norm", "head"]


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face tensor: its name and its shape in symbols."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter.

    Attributes:
        megatron: name within a stage's `GPTModel`.
        kind: layout over tensor parallelism (see the module).
        parts: the Hugging Face tensors it holds.
        place: `embedding` on the first stage, `layer` once per layer, `norm` and `head` on the last stage.
    """

    megatron: str
    kind: Kind
    parts: tuple[Part, ...]
    place: Place = "layer"


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` means.

    Attributes:
        model_type: Hugging Face's key.
        model_class: Hugging Face's class name, written into exported configs.
        qkv_bias: q, k and v projections have a bias (no other linear layer ever has one here).
        qk_norm: queries and keys are normalised per head.
        rows: its parameters; where the embeddings are tied there is no `head` row's tensor.
    """

    model_type: str
    model_class: str
    qkv_bias: bool
    qk_norm: bool
    rows: tuple[Row, ...]


def _layer(megatron: str, kind: Kind, *parts: tuple[str, tuple[str, ...]]) -> Row:
    return Row(
        f"decoder.layers.{{layer}}.{megatron}",
        kind,
        tuple(Part(f"model.layers.{{layer}}.{name}", shape) for name, shape in parts),
    )


_EMBEDDING = Row(
    "embedding.word_embeddings.weight", "vocab", (Part("model.embed_tokens.weight", ("vocab", "hidden")),), "embedding"
)
_FINAL_NORM = Row("decoder.final_layernorm.weight", "replicated", (Part("model.norm.weight", ("hidden",)),), "norm")
_HEAD = Row("output_layer.weight", "vocab", (Part("lm_head.weight", ("vocab", "hidden")),), "head")

_ATTENTION = (
    _layer("input_layernorm.weight", "replicated", ("input_layernorm.weight", ("hidden",))),
    _layer(
        "self_attention.linear_qkv.weight",
        "qkv",
        ("self_attn.q_proj.weight", ("q", "hidden")),
        ("self_attn.k_proj.weight", ("kv", "hidden")),
        ("self_attn.v_proj.weight", ("kv", "hidden")),
    ),
    _layer("self_attention.linear_proj.weight", "row", ("self_attn.o_proj.weight", ("hidden", "q"))),
)
_QKV_BIAS = (
    _layer(
        "self_attention.linear_qkv.bias",
        "qkv",
        ("self_attn.q_proj.bias", ("q",)),
        ("self_attn.k_proj.bias", ("kv",)),
        ("self_attn.v_proj.bias", ("kv",)),
    ),
)
_QK_NORM = (
    _layer("self_attention.q_layernorm.weight", "replicated", ("self_attn.q_norm.weight", ("head_dim",))),
    _layer("self_attention.k_layernorm.weight", "replicated", ("self_attn.k_norm.weight", ("head_dim",))),
)
_SWIGLU = (
    _layer("pre_mlp_layernorm.weight", "replicated", ("post_attention_layernorm.weight", ("hidden",))),
    _layer(
        "mlp.linear_fc1.weight",
        "gate_up",
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    _layer("mlp.linear_fc2.weight", "row", ("mlp.down_proj.weight", ("hidden", "ffn"))),
)


def _family(model_type: str, model_class: str, *, qkv_bias: bool = False, qk_norm: bool = False) -> Family:
    layer = _ATTENTION + _QKV_BIAS * qkv_bias + _QK_NORM * qk_norm + _SWIGLU
    return Family(model_type, model_class, qkv_bias, qk_norm, (_EMBEDDING, *layer, _FINAL_NORM, _HEAD))


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _family("llama", "LlamaForCausalLM"),
        _family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        _family("qwen3", "Qwen3ForCausalLM", qk_norm=True),
    )
}
