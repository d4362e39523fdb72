"""Branch attention inside Megatron-core's own layers: a core attention, a descriptor, and one early exit.

Injection is by Megatron's extension points: the core attention is a submodule of the layer spec, and the descriptor
travels as a `PackedSeqParams`, which Megatron hands to every layer and through recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_branch.attention.branch import branch_attention, leave_state
from megatron_branch.attention.descriptor import PassDescriptor


@dataclass
class BranchParams(PackedSeqParams):
    """The pass descriptor in the form that Megatron carries."""

    unit: PassDescriptor | None = None

    @property
    def positions(self) -> Tensor:
        """Absolute position of each local token, int64 `[t]`; the rotary table is indexed with it."""
        return self.pass_descriptor.positions

    @property
    def pass_descriptor(self) -> PassDescriptor:
        """The descriptor; every pass of a branch model has one."""
        assert self.unit is not None
        return self.unit


class BranchAttention(MegatronModule):
    """Core attention over the ancestors' state and the own tokens. Takes and returns Megatron's `[s, b = 1, h]`
    layout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        **options: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: BranchParams | None = None,
    ) -> Tensor:
        """query `[t, 1, H, D]`, key and value `[t, 1, G, D]` -> `[t, 1, H * D]`."""
        assert packed_seq_params is not None and attention_bias is None
        q_tHD, k_tGD, v_tGD = query[:, 0], key[:, 0], value[:, 0]
        out_tHD = branch_attention(q_tHD, k_tGD, v_tGD, packed_seq_params.pass_descriptor, self.layer_number)
        return out_tHD.reshape(out_tHD.shape[0], 1, -1)


class BranchSelfAttention(SelfAttention):
    """Megatron's self attention, which can also stop at keys and values."""

    def write_state(self, hidden_states: Tensor, rotary_pos_emb: Tensor, packed_seq_params: BranchParams) -> None:
        """Compute keys and values of `[t, 1, hidden]` (normalised) and hand them to the pass; no attention output."""
        _, key, value = self.get_query_key_value_tensors(hidden_states)
        key = apply_rotary_pos_emb(
            key,
            rotary_pos_emb,
            config=self.config,
            cu_seqlens=None,
            mscale=_yarn_get_concentration_factor_from_config(self.config),
            cp_group=self.pg_collection.cp,
        )
        leave_state(key[:, 0], value[:, 0], packed_seq_params.pass_descriptor, self.layer_number)


class BranchLayer(TransformerLayer):
    """Megatron's layer. The last one of the model ends a pass that only leaves state at its keys and values.

    It can keep its input alone and be computed again in the backward.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: BranchParams | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's; the output of a pass that ends here is its input, and is not used."""
        assert packed_seq_params is not None
        if packed_seq_params.pass_descriptor.recompute_layers:
            # Not reentrant: one graph, so that keys and values inside can be roots of the backward. Nothing is random
            # in a layer, since dropout is refused.
            return checkpoint(
                self._compute,
                hidden_states,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        return self._compute(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _compute(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: BranchParams, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if packed_seq_params.pass_descriptor.state_only and self.layer_number == self.config.num_layers:
            normed = self.input_layernorm(hidden_states)
            self.self_attention.write_state(normed, kwargs["rotary_pos_emb"], packed_seq_params)
            return hidden_states, None
        return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)


class BranchNorm(nn.RMSNorm):
    """Torch's RMSNorm with Megatron's arguments; Megatron's own wrapper of it refuses sequence parallelism, where it
    works like anywhere else: on each token alone.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)


def branch_block_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """A stage of Megatron's local GPT layers with branch attention at their core."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    spec.module = BranchLayer
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = BranchNorm
    attention = spec.submodules.self_attention
    attention.module = BranchSelfAttention
    attention.submodules.core_attention = BranchAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = BranchNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=BranchNorm)
