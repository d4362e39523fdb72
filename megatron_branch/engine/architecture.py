"""What a model is, read from a Hugging Face config; whatever we would compute differently is refused by name here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from transformers import PretrainedConfig

from megatron_branch.engine.families import FAMILIES, Family
from megatron_branch.plan.cost import ModelShape

# Keys that a rope type needs (True) or may have (False); anything else would be ignored, so it is refused.
_ROPE_KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {"factor": True},
    "llama3": {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": True,
    },
    "yarn": {
        "factor": True,
        "original_max_position_embeddings": True,
        "attention_factor": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "truncate": False,
    },
}

# Settings that other programs leave in config.json, beside `_private` ones and token ids; they say nothing about the
# computation.
_REMARKS = frozenset({"is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed"})


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary positions, under Hugging Face's names.

    Attributes:
        rope_type: `default`, `linear`, `llama3` or `yarn`.
        theta: base of the wavelengths.
        parameters: the remaining entries of `rope_parameters`, sorted by key.
    """

    rope_type: str
    theta: float
    parameters: tuple[tuple[str, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The settings as Hugging Face's `rope_parameters`."""
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **dict(self.parameters)}


@dataclass(frozen=True, slots=True)
class TransformersModules:
    """A model that is built of its own Hugging Face modules.

    Attributes:
        model_class: its class.
        parameters: name and shape of each, tied ones once, in the order of the model.
        embedding, head: names of the embedding and of the output projection.
        logit_factor: what the output of the projection is multiplied with.
    """

    model_class: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    embedding: str
    head: str
    logit_factor: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder: RMSNorm before attention and before a SwiGLU layer, rotary positions, grouped-query attention.

    Attributes:
        family: key of `FAMILIES`, or any `model_type` for a model of Hugging Face's modules.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes; `vocab` is unpadded.
        tied: the output projection is the embedding.
        qkv_bias, qk_norm: see `Family`.
        norm_eps: epsilon of every RMSNorm.
        rope: rotary positions.
        max_positions: the length that the config declares, in tokens.
        transformers: for the host of that name; what is said of norms, biases and the MLP above need not hold then.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: RopeSettings
    max_positions: int
    transformers: TransformersModules | None = None

    def shape(self) -> ModelShape:
        """The sizes that costs depend on."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            ffn=self.ffn,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
        )

    def padded_vocab(self, tp: int) -> int:
        """Smallest multiple of `tp` that holds the vocabulary."""
        return -(-self.vocab // tp) * tp


def family_of(model_type: object, *, source: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ValueError: it is not supported.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        _refuse(source, "model_type", model_type, "unknown architecture", f"use one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def architecture_from_config(config: PretrainedConfig, *, source: str) -> Architecture:
    """Read a config of `llama`, `qwen2` or `qwen3`.

    Args:
        config: as transformers reads it, so that rope settings of any age stand in `rope_parameters`.
        source: where it came from, for messages.

    Raises:
        ValueError: a setting is unknown or asks for something that is not computed here.
    """
    family = family_of(config.model_type, source=source)
    _refuse_unsupported(config, source)
    heads = positive_size(config, "num_attention_heads", source)
    kv_heads = positive_size(config, "num_key_value_heads", source)
    hidden = positive_size(config, "hidden_size", source)
    if heads % kv_heads:
        _refuse(source, "num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}", "fix the config")
    if getattr(config, "head_dim", None) is not None:
        head_dim = positive_size(config, "head_dim", source)
    elif hidden % heads:
        _refuse(source, "hidden_size", hidden, f"not a multiple of num_attention_heads = {heads}", "give head_dim")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        _refuse(source, "head_dim", head_dim, "rotary positions turn pairs, so it must be even", "fix the config")
    return Architecture(
        family=family.model_type,
        layers=positive_size(config, "num_hidden_layers", source),
        hidden=hidden,
        ffn=positive_size(config, "intermediate_size", source),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=positive_size(config, "vocab_size", source),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=float(config.rms_norm_eps),
        rope=_rope_settings(config, source),
        max_positions=positive_size(config, "max_position_embeddings", source),
    )


def check_layout(arch: Architecture, *, tp: int, pp: int, ulysses: int = 1) -> None:
    """Raise ValueError, with the numbers and the remedy, unless the model can be split over `tp` and `pp` ranks, and
    its heads over Ulysses groups of `ulysses` ranks."""
    if pp > arch.layers:
        raise ValueError(
            f"parallel.pp={pp} is more than the model's {arch.layers} layers: every pipeline stage needs at least one; "
            f"set parallel.pp to {arch.layers} or less"
        )
    for name, size in (("attention heads", arch.heads), ("KV heads", arch.kv_heads), ("MLP columns (ffn)", arch.ffn)):
        if size % tp:
            common = math.gcd(math.gcd(arch.heads, arch.kv_heads), arch.ffn)
            allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ValueError(
                f"parallel.tp={tp} does not divide the model's {size} {name}: each rank holds an equal share; "
                f"set parallel.tp to one of {allowed}"
            )
    check_heads(arch.heads, arch.kv_heads, tp=tp, ulysses=ulysses)


def check_heads(heads: int, kv_heads: int, *, tp: int, ulysses: int) -> None:
    """Raise ValueError unless the heads of a model, split over `tp`, can be exchanged among `ulysses` ranks."""
    heads, kv_heads = heads // tp, kv_heads // tp
    if not _heads_divide(heads, kv_heads, ulysses):
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if _heads_divide(heads, kv_heads, n))
        raise ValueError(
            f"parallel.cp_mode=ulysses over {ulysses} ranks, but with parallel.tp={tp} a rank has {heads} attention "
            f"heads and {kv_heads} KV heads: {ulysses} must divide the former, and divide the latter or be a multiple; "
            f"set parallel.ulysses_size to one of {allowed} that divides parallel.cp, or parallel.cp_mode=pass_q"
        )


def _heads_divide(heads: int, kv_heads: int, ulysses: int) -> bool:
    """Whether every rank of a Ulysses group gets equally many query heads, and whole KV heads or one replica."""
    return heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)


def stage_layers(arch: Architecture, pp: int) -> tuple[int, ...]:
    """Number of layers of each pipeline stage: as even as possible; where not, later stages have one less."""
    each, extra = divmod(arch.layers, pp)
    return tuple(each + (stage < extra) for stage in range(pp))


def _refuse(source: str, key: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ValueError(f"{source}: {key} = {value!r} is not supported: {rule}; {remedy}")


def positive_size(config: PretrainedConfig, key: str, source: str) -> int:
    """A size of the config; ValueError unless it is a positive integer."""
    value = getattr(config, key, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(source, key, value, "must be a positive integer", "fix the config")
    return value


def refuse_quantised_and_dropout(settings: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for settings of a config that no host computes."""
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method")
        _refuse(source, "quantization_config", method, "weights must be floating point", "use the unquantised model")
    for key, value in settings.items():
        if ("dropout" in key or key.endswith("pdrop")) and value:
            _refuse(source, key, value, "one shared forward pass cannot draw a mask per rollout", "set it to 0")


def _refuse_unsupported(config: PretrainedConfig, source: str) -> None:
    settings = config.to_dict()
    refuse_quantised_and_dropout(settings, source)
    if config.hidden_act != "silu":
        _refuse(source, "hidden_act", config.hidden_act, "only SwiGLU with silu is computed", "use another model")
    for key in ("attention_bias", "mlp_bias"):
        if settings.get(key):
            _refuse(source, key, settings[key], f"{config.model_type} has no such bias here", "use another model")
    if settings.get("pretraining_tp") not in (None, 1):
        _refuse(source, "pretraining_tp", settings["pretraining_tp"], "sliced matrix products", "set it to 1")
    kinds = sorted(set(settings.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        remedy = "set use_sliding_window to false or use another model"
        _refuse(source, "layer_types", kinds, "every layer must have full attention", remedy)
    known = type(config)().to_dict().keys() | _REMARKS | {"head_dim", "architectures", "torch_dtype"}
    for key in sorted(settings.keys() - known):
        remark = key.startswith("_") or key.endswith("_token_id")
        if not remark and settings[key] not in (None, False):
            _refuse(source, key, settings[key], f"unknown to {config.model_type}", "remove it if it means nothing")


def _rope_settings(config: PretrainedConfig, source: str) -> RopeSettings:
    given: Mapping[str, Any] = config.rope_parameters or {}
    rope_type = given.get("rope_type", "default")
    if rope_type not in _ROPE_KEYS:
        _refuse(source, "rope_parameters.rope_type", rope_type, "unknown", f"use one of {', '.join(_ROPE_KEYS)}")
    if given.get("type", rope_type) != rope_type:
        _refuse(source, "rope_parameters.type", given["type"], f"rope_type is {rope_type!r}", "remove one of the two")
    if given.get("partial_rotary_factor") not in (None, 1):
        value = given["partial_rotary_factor"]
        _refuse(source, "rope_parameters.partial_rotary_factor", value, "the whole head is turned", "use another model")
    keys = _ROPE_KEYS[rope_type]
    rest = {k: v for k, v in given.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    for key in sorted(rest.keys() - keys.keys()):
        _refuse(source, f"rope_parameters.{key}", rest[key], f"unknown for rope_type {rope_type!r}", "remove it")
    numbers = {key: value for key, value in rest.items() if value is not None or keys[key] or key == "truncate"}
    for key in sorted(key for key, needed in keys.items() if needed and key not in numbers):
        _refuse(source, f"rope_parameters.{key}", None, f"rope_type {rope_type!r} needs it", "add it")
    theta = given.get("rope_theta")
    for key, value in {"rope_theta": theta, **numbers}.items():
        wanted = bool if key == "truncate" else (int, float)
        if not isinstance(value, wanted) or not math.isfinite(value) or (key != "truncate" and value <= 0):
            rule = "must be true or false" if key == "truncate" else "must be a positive number"
            _refuse(source, f"rope_parameters.{key}", value, rule, "fix the config")
    return RopeSettings(rope_type, float(theta), tuple(sorted(numbers.items())))
