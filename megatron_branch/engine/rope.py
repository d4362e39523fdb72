"""Rotary positions by absolute position; frequencies as Hugging Face computes them.

Legend: T tokens of a pass, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_branch.engine.architecture import RopeSettings
from megatron_branch.engine.spec import BranchParams


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


class PositionRope(RotaryEmbedding):
    """Megatron's rotary embedding, which also takes the positions of a branch pass; it keeps nothing between passes.

    `GPTModel` first asks for a length, then hands that to `forward`. For a branch pass the "length" is its positions,
    from its descriptor, so microbatches in flight cannot read each other's. Any other batch is answered as before.

    Up to position 2**24 the angles are those of Megatron's table (and of Hugging Face, for its frequencies) bit for
    bit: both multiply in float32, and the product of two float32 values is exact in float64 before the one rounding.
    Beyond, they first round the position to float32, while here it stays whole and the angle is the float32 nearest to
    the product (float32 resolves an angle of 2**24 to 1 rad, in either case).
    """

    @classmethod
    def of(cls, original: nn.Module) -> PositionRope:
        """The same embedding with this class.

        Raises:
            ValueError: `original` is of another class than Megatron's RotaryEmbedding.
        """
        if type(original) is not RotaryEmbedding:
            raise ValueError(
                f"rotary_pos_emb is a {type(original).__name__}, which is not supported for trees of rollouts; use "
                "position_embedding_type='rope', whose class is RotaryEmbedding"
            )
        rope = cls.__new__(cls)
        rope.__dict__.update(original.__dict__)
        return rope

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> Any:
        """The positions of a branch pass, int64 `[T]`; of any other batch its length."""
        params = args[4] if len(args) > 4 else options.get("packed_seq_params")
        if isinstance(params, BranchParams):
            return params.positions
        return super().get_rotary_seq_len(*args, **options)

    def forward(self, max_seq_len: Any, *args: Any, **options: Any) -> Tensor:
        """Angles, float32 `[T, 1, 1, D]`, in the order of the dimensions that they turn."""
        if not isinstance(max_seq_len, Tensor):
            return super().forward(max_seq_len, *args, **options)
        positions = max_seq_len
        frequencies = self.inv_freq.to(positions.device)
        if self.seq_len_interpolation_factor is not None:
            positions = positions.to(frequencies.dtype) * (1 / self.seq_len_interpolation_factor)
        half_TF = (positions.double()[:, None] * frequencies.double()).to(frequencies.dtype)
        pairs_TD = half_TF.repeat_interleave(2, -1) if self.rotary_interleaved else torch.cat((half_TF, half_TF), -1)
        return pairs_TD[:, None, None, :]
