"""Rotary positions by absolute position, as Hugging Face computes them.

Legend: T tokens of a pass, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_branch.engine.architecture import RopeSettings


class HasPositions(Protocol):
    """The part of a pass's descriptor that this module reads: int64 `[T]`, absolute."""

    positions: Tensor


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of head dimensions, float32 `[D / 2]`, and the factor on cosine and sine.

    Transformers' own functions are asked (all but `default`, which it keeps inside its models), so the numbers agree
    bit for bit. The factor is 1 except for yarn; `model_config` hands it to Megatron's attention.
    """
    if rope.rope_type == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (rope.theta**exponent), 1.0
    settings = rope.as_dict()
    extended = settings["factor"] * settings.get("original_max_position_embeddings", 2048)
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=int(extended),  # enters no formula; another value only draws warnings
        rope_parameters=settings,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, device=torch.device("cpu"))
    return frequencies, float(factor)


class PositionRope(nn.Module):
    """Takes the place of `GPTModel.rotary_pos_emb` and keeps nothing between passes.

    `GPTModel` first asks for a length, then hands that to `forward`. The "length" is here the positions of the pass,
    from its descriptor, so microbatches in flight cannot read each other's.

    Up to position 2**24 the angles equal Hugging Face's bit for bit: it multiplies in float32, and the product of two
    float32 values is exact in float64 before the one rounding. Beyond, Hugging Face first rounds the position to
    float32, while here it stays whole and the angle is the float32 nearest to the product (float32 resolves an angle of
    2**24 to 1 rad, in either case).
    """

    def __init__(self, rope: RopeSettings, head_dim: int) -> None:
        super().__init__()
        # Neither parameter nor buffer: `model.bfloat16()` would round a buffer.
        self.frequencies = inverse_frequencies(rope, head_dim)[0].double()

    def get_rotary_seq_len(
        self,
        inference_context: object,
        transformer: object,
        transformer_input: object,
        transformer_config: object,
        packed_seq_params: HasPositions,
    ) -> Tensor:
        """The positions of the pass, int64 `[T]` (Megatron's name and arguments; only the descriptor is read)."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: object = None) -> Tensor:
        """Angles, float32 `[T, 1, 1, D]`, the two halves of D alike (Megatron turns halves, not interleaved pairs).

        Raises:
            ValueError: Megatron's packed `thd` format, whose positions restart at every sequence.
        """
        if packed_seq:
            raise ValueError("qkv_format 'thd' is not supported: positions are absolute; use 'sbhd' with one sequence")
        half_TF = (positions.double()[:, None] * self.frequencies.to(positions.device)).float()
        return torch.cat((half_TF, half_TF), dim=-1)[:, None, None, :]
