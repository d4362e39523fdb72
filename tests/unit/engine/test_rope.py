"""Angles equal Hugging Face's bit for bit, by absolute position, whatever the model is cast to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_branch.engine.architecture import architecture_from_config
from megatron_branch.engine.rope import PositionRope, inverse_frequencies
from megatron_branch.engine.spec import BranchParams

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
    """Megatron's module with the frequencies of a model folder, as `build_model` makes it."""
    arch = architecture_from_config(config(settings), source="config.json")
    original = RotaryEmbedding(arch.head_dim, 1.0, use_cpu_initialization=True)
    original.inv_freq = inverse_frequencies(arch.rope, arch.head_dim)[0]
    return PositionRope.of(original)


def branch_pass(positions: list[int]) -> BranchParams:
    return BranchParams(qkv_format="sbhd", unit=SimpleNamespace(positions=torch.tensor(positions)))


def angles(module: PositionRope, positions: list[int]) -> torch.Tensor:
    length = module.get_rotary_seq_len(None, None, None, None, branch_pass(positions))
    return module(length, packed_seq=False, cp_group=None)


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
    frequency = float(module.inv_freq[-1])
    for position in (2**24 + 1, 2**26 + 3):
        expected = torch.tensor(position * frequency, dtype=torch.float64).float()
        assert angles(module, [position])[0, 0, 0, 15] == expected
    first = float(module.inv_freq[0])
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
    one = module.get_rotary_seq_len(None, None, None, None, branch_pass([3, 4]))
    module.get_rotary_seq_len(None, None, None, None, branch_pass([90]))
    assert torch.equal(module(one), angles(module, [3, 4]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"seq_len_interpolation_factor": 3.0}, {"rope_scaling": True}, {"rotary_percent": 0.5}],
    ids=["plain", "interpolated", "scaled", "half"],
)
def test_angles_are_megatron_s(settings: dict[str, Any], interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    original = RotaryEmbedding(
        kv_channels=32,
        rotary_percent=settings.get("rotary_percent", 1.0),
        rotary_interleaved=interleaved,
        use_cpu_initialization=True,
        **{name: value for name, value in settings.items() if name != "rotary_percent"},
    )
    module = PositionRope.of(original)
    positions = [0, 5, 63, 4_097, 70_001]
    table = original.get_freqs_non_repeated(70_002)
    theirs = original(512, packed_seq=True)  # the whole table, whatever the context-parallel ranks
    half = table[positions]
    ours = angles(module, positions)
    expected = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    assert torch.equal(ours[:, 0, 0], expected)
    assert torch.equal(ours[:3], theirs[positions[:3]])
    assert torch.equal(module(512, packed_seq=True), theirs)  # an ordinary batch


def test_another_embedding_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Identity"):
        PositionRope.of(torch.nn.Identity())
