"""Angles equal Hugging Face's bit for bit, by absolute position, whatever the model is cast to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_branch.engine.architecture import architecture_from_config
from megatron_branch.engine.rope import PositionRope, inverse_frequencies

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all settings": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}


def config(settings: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=512, rope_parameters=dict(settings)
    )


def build(settings: dict[str, Any]) -> PositionRope:
    arch = architecture_from_config(config(settings), source="config.json")
    return PositionRope(arch.rope, arch.head_dim)


def angles(module: PositionRope, positions: list[int]) -> torch.Tensor:
    descriptor = SimpleNamespace(positions=torch.tensor(positions))
    return module(module.get_rotary_seq_len(None, None, None, None, descriptor), packed_seq=False, cp_group=None)


@pytest.mark.parametrize("settings", ROPES.values(), ids=ROPES)
def test_cosines_and_sines_are_hugging_faces(settings: dict[str, Any]) -> None:
    positions = [0, 1, 5, 63, 64, 511, 513, 100_003, 2**24 - 1, 2**24]
    theirs = LlamaRotaryEmbedding(config(settings))(torch.zeros(1), torch.tensor(positions)[None])
    module = build(settings)
    arch = architecture_from_config(config(settings), source="config.json")
    factor = inverse_frequencies(arch.rope, arch.head_dim)[1]
    ours = angles(module, positions)
    assert ours.shape == (len(positions), 1, 1, 32) and ours.dtype == torch.float32
    for function, expected in zip((torch.cos, torch.sin), theirs, strict=True):
        assert torch.equal(function(ours[:, 0, 0]) * factor, expected[0])


def test_only_yarn_has_a_factor() -> None:
    factors = {}
    for name, settings in ROPES.items():
        arch = architecture_from_config(config(settings), source="config.json")
        factors[name] = inverse_frequencies(arch.rope, arch.head_dim)[1]
    assert factors["default"] == factors["linear"] == factors["llama3"] == 1.0
    assert factors["yarn"] > 1.1 and factors["yarn, all settings"] > 1.1


def test_positions_past_float32_stay_distinct() -> None:
    """2**24 + 1 is no float32: the angle must come from the integer, rounded once. The slowest pair shows it."""
    module = build(ROPES["linear"])
    frequency = float(module.frequencies[-1])
    for position in (2**24 + 1, 2**26 + 3):
        expected = torch.tensor(position * frequency, dtype=torch.float64).float()
        assert angles(module, [position])[0, 0, 0, 15] == expected
    first = float(module.frequencies[0])
    spread = angles(module, [2**24 + 1])[0, 0, 0, 0] - torch.tensor(float(2**24)) * torch.tensor(first)
    assert spread != 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casting_the_model_does_not_touch_the_angles(dtype: torch.dtype) -> None:
    module = build(ROPES["llama3"])
    before = angles(module, [7, 1000])
    holder = torch.nn.ModuleList([module]).to(dtype)
    assert torch.equal(angles(holder[0], [7, 1000]), before)
    assert not list(module.parameters()) and not list(module.buffers())


def test_passes_in_flight_do_not_share_positions() -> None:
    module = build(ROPES["default"])
    one = module.get_rotary_seq_len(None, None, None, None, SimpleNamespace(positions=torch.tensor([3, 4])))
    module.get_rotary_seq_len(None, None, None, None, SimpleNamespace(positions=torch.tensor([90])))
    assert torch.equal(module(one), angles(module, [3, 4]))


def test_packed_format_is_refused() -> None:
    with pytest.raises(ValueError, match="thd"):
        build(ROPES["default"])(torch.tensor([0]), packed_seq=True)
