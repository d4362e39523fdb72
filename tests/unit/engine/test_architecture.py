"""Configs become architectures; what is not computed is refused with key, value, rule and remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from megatron_branch.engine.architecture import (
    Architecture,
    RopeSettings,
    architecture_from_config,
    check_layout,
    stage_layers,
)
from megatron_branch.plan.cost import ModelShape

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}


def config(family: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **(SIZES | changes))


def read(family: str, **changes: Any) -> Architecture:
    return architecture_from_config(config(family, **changes), source="config.json")


def test_qwen3_is_read_completely() -> None:
    arch = read("qwen3", head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert arch == Architecture(
        family="qwen3",
        layers=3,
        hidden=32,
        ffn=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=97,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-5,
        rope=RopeSettings("default", 10000.0),
        max_positions=512,
    )
    assert arch.shape() == ModelShape(layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=97)


def test_flags_come_from_the_family() -> None:
    flags = {family: read(family) for family in ("llama", "qwen2", "qwen3")}
    assert {family: (arch.qkv_bias, arch.qk_norm) for family, arch in flags.items()} == {
        "llama": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
    }


def test_head_dim_defaults_to_the_share_of_hidden() -> None:
    assert read("llama").head_dim == read("qwen2").head_dim == 8
    assert read("llama", head_dim=16).head_dim == 16


V4_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 256),
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            {"rope_theta": 500000.0}, RopeSettings("default", 500000.0), id="theta alone, as version 4 wrote it"
        ),
        pytest.param(V4_LLAMA3, RopeSettings("llama3", 500000.0, LLAMA3), id="llama3, as version 4 wrote it"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7000.0},
            RopeSettings("linear", 7000.0, (("factor", 2.0),)),
            id="type instead of rope_type",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            RopeSettings("default", 1e6),
            id="explicit default",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 4, "partial_rotary_factor": 1.0}},
            RopeSettings("linear", 5.0, (("factor", 4),)),
            id="the whole head turned, said explicitly",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": None,
                    "truncate": False,
                }
            },
            RopeSettings(
                "yarn", 1e4, (("factor", 4.0), ("original_max_position_embeddings", 128), ("truncate", False))
            ),
            id="yarn; null is the same as absent",
        ),
    ],
)
def test_rope_settings_survive(settings: dict[str, Any], expected: RopeSettings) -> None:
    assert read("llama", **settings).rope == expected


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4} | parameters}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {}, r"model_type = 'mistral' .* use one of llama, qwen2, qwen3"),
        ("qwen3_moe", {}, r"model_type = 'qwen3_moe'"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout = 0\.1 .* set it to 0"),
        ("llama", {"resid_pdrop": 0.1}, r"resid_pdrop = 0\.1 .* set it to 0"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, r"attention_bias = True .* llama has no such bias"),
        ("qwen3", {"attention_bias": True}, r"attention_bias = True .* qwen3 has no such bias"),
        ("llama", {"mlp_bias": True}, r"mlp_bias = True"),
        ("llama", {"pretraining_tp": 2}, r"pretraining_tp = 2 .* set it to 1"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            r"layer_types = \['sliding_attention'\] .* set use_sliding_window to false",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config = 'gptq' .* unquantised"),
        ("llama", {"logit_scale": 0.5}, r"logit_scale = 0\.5 .* unknown to llama; remove it"),
        ("llama", {"num_experts": 8}, r"num_experts = 8 .* unknown to llama"),
        ("llama", {"original_max_position_embeddings": 64}, r"original_max_position_embeddings = 64"),
        ("qwen2", {"num_key_value_heads": 3}, r"num_key_value_heads = 3 .* must divide num_attention_heads = 4"),
        ("qwen2", {"hidden_size": 34}, r"hidden_size = 34 .* not a multiple of num_attention_heads = 4; give head_dim"),
        ("qwen2", {"hidden_size": 12}, r"head_dim = 3 .* must be even"),
        ("qwen2", {"num_hidden_layers": 0}, r"num_hidden_layers = 0 .* positive integer"),
        (
            "llama",
            rope(rope_type="dynamic", factor=2.0),
            r"rope_type = 'dynamic' .* use one of default, linear, llama3",
        ),
        ("llama", rope(rope_type="linear", type="yarn", factor=2.0), r"rope_parameters\.type = 'yarn'"),
        ("llama", rope(rope_type="default", factor=2.0), r"rope_parameters\.factor = 2\.0 .* unknown for rope_type"),
        ("llama", rope(rope_type="linear", factor=2.0, beta=1), r"rope_parameters\.beta = 1 .* remove it"),
        ("llama", rope(rope_type="linear", factor=None), r"rope_parameters\.factor = None .* positive number"),
        ("llama", rope(rope_type="linear", factor=float("nan")), r"rope_parameters\.factor = nan .* positive number"),
        ("llama", rope(rope_type="default", partial_rotary_factor=0.5), r"partial_rotary_factor = 0\.5"),
        ("llama", {"rope_parameters": YARN | {"truncate": 3}}, r"truncate = 3 .* true or false"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": -1.0}}, r"beta_fast = -1\.0 .* positive number"),
    ],
)
def test_unsupported_settings_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    given = config(family, **changes)
    with pytest.raises(ValueError, match=r"^folder/config\.json: (rope_parameters\.)?" + message):
        architecture_from_config(given, source="folder/config.json")


def test_a_rope_key_that_is_needed_is_asked_for() -> None:
    given = config("llama", **rope(rope_type="linear", factor=2.0))
    del given.rope_parameters["factor"]
    with pytest.raises(ValueError, match=r"rope_parameters\.factor = None .* rope_type 'linear' needs it; add it"):
        architecture_from_config(given, source="config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"use_mrope": False, "_name_or_path": "somewhere", "unk_token_id": 0, "unsloth_version": "2026.1"},
    ],
    ids=["sliding window on no layer", "remarks and settings that are off"],
)
def test_settings_without_effect_on_the_computation_pass(changes: dict[str, Any]) -> None:
    assert read("qwen2", **changes) == read("qwen2")


@pytest.mark.parametrize(("tp", "padded"), [(1, 97), (2, 98), (4, 100), (8, 104), (97, 97)])
def test_vocabulary_is_padded_to_the_ranks(tp: int, padded: int) -> None:
    assert read("llama").padded_vocab(tp) == padded


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (1, 4, r"parallel\.pp=4 is more than the model's 3 layers.*set parallel\.pp to 3 or less"),
        (3, 1, r"parallel\.tp=3 does not divide the model's 4 attention heads.*one of 1, 2$"),
        (4, 1, r"parallel\.tp=4 does not divide the model's 2 KV heads.*one of 1, 2$"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(read("llama"), tp=tp, pp=pp)


def test_odd_ffn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tp=2 does not divide the model's 49 MLP columns.*one of 1$"):
        check_layout(read("llama", intermediate_size=49), tp=2, pp=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "ulysses", "message"),
    [
        (4, 2, 1, 8, r"ulysses over 8 ranks, but with parallel\.tp=1 a rank has 4 .* 2 KV heads.*one of 1, 2, 4 "),
        (4, 2, 2, 4, r"ulysses over 4 ranks, but with parallel\.tp=2 a rank has 2 .* 1 KV heads.*one of 1, 2 "),
        (12, 6, 1, 4, r"ulysses over 4 ranks, but with parallel\.tp=1 a rank has 12 .* 6 KV .*one of 1, 2, 3, 6, 12 "),
    ],
)
def test_heads_that_ulysses_cannot_divide_are_refused(
    heads: int, kv_heads: int, tp: int, ulysses: int, message: str
) -> None:
    arch = read("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=48)
    with pytest.raises(ValueError, match=message + r".*parallel\.cp_mode=pass_q$"):
        check_layout(arch, tp=tp, pp=1, ulysses=ulysses)


def test_layouts_that_fit_pass() -> None:
    check_layout(read("llama"), tp=2, pp=3)
    for ulysses in (1, 2, 4):
        check_layout(read("llama"), tp=1, pp=1, ulysses=ulysses)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(4, 1, (4,)), (4, 4, (1, 1, 1, 1)), (5, 4, (2, 1, 1, 1)), (30, 4, (8, 8, 7, 7)), (9, 6, (2, 2, 2, 1, 1, 1))],
)
def test_stages_are_even(layers: int, pp: int, expected: tuple[int, ...]) -> None:
    assert stage_layers(dataclasses.replace(read("llama"), layers=layers), pp) == expected
