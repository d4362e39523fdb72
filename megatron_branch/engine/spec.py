"""Branch attention inside Megatron-core's own layers: a core attention, a descriptor, and one early exit.

A layer that has them computes branch passes, and every other batch as before. Injection is by Megatron's extension
points: the core attention is a submodule of the layer spec, and the descriptor travels as a `PackedSeqParams`, which
Megatron hands to every layer and through recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
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


class BranchCore:
    """What a core attention does with a branch pass: attention over the ancestors' state and the own tokens.

    Comes before a core attention of Megatron among the bases of a class, which keeps its parameters, their names and
    its answer to every other batch. Takes and returns Megatron's `[s, b = 1, h]` layout.
    """

    layer_number: int

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """query `[t, 1, H, D]`, key and value `[t, 1, G, D]` -> `[t, 1, H * D]`."""
        if not isinstance(packed_seq_params, BranchParams):
            theirs: Any = super()
            return theirs.forward(
                query, key, value, attention_mask, *args, packed_seq_params=packed_seq_params, **options
            )
        q_tHD, k_tGD, v_tGD = query[:, 0], key[:, 0], value[:, 0]
        out_tHD = branch_attention(q_tHD, k_tGD, v_tGD, packed_seq_params.pass_descriptor, self.layer_number)
        return out_tHD.reshape(out_tHD.shape[0], 1, -1)


@cache
def branch_core(original: type) -> type:
    """A core attention class that also computes branch passes."""
    return type(f"Branch{original.__name__}", (BranchCore, original), {})


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
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's; the output of a pass that ends here is its input, and is not used."""
        if not isinstance(packed_seq_params, BranchParams):
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
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
        # Megatron sums the gradients of parameters with this mark over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def adopt_spec(spec: ModuleSpec | TransformerBlockSubmodules) -> ModuleSpec | TransformerBlockSubmodules:
    """A copy of a GPT layer spec, or of a stage's layer specs, whose layers also compute branch passes.

    Any other batch is computed by the classes of `spec`, and parameters keep their names.

    Raises:
        ValueError: a class of the spec is none of those that are known to compute what a branch pass computes.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return replace(spec, layer_specs=[adopt_spec(layer) for layer in spec.layer_specs or ()])
    _expect("layer", spec, TransformerLayer)
    parts = spec.submodules
    _expect("cross_attention", parts.cross_attention, IdentityOp)
    _expect("mlp", parts.mlp, MLP)
    _expect("self_attention", parts.self_attention, SelfAttention)
    mask = parts.self_attention.params.get("attn_mask_type")
    if mask != AttnMaskType.causal:
        raise ValueError(f"self_attention of the layer spec: attn_mask_type={mask} is not supported; use causal")
    inner = parts.self_attention.submodules
    core = _expect("core_attention", inner.core_attention, *_known_cores())
    ours: Any = branch_core(core)
    if isinstance(inner.core_attention, ModuleSpec):
        ours = replace(inner.core_attention, module=ours)
    attention = replace(
        parts.self_attention, module=BranchSelfAttention, submodules=replace(inner, core_attention=ours)
    )
    return replace(spec, module=BranchLayer, submodules=replace(parts, self_attention=attention))


def _expect(part: str, given: Any, *known: type) -> type:
    """The class of a part of a layer spec, if it is one of the known ones.

    A subclass is another class: nobody has looked at what it computes.
    """
    module = get_module(given)
    if module not in known:
        names = " or ".join(one.__name__ for one in known)
        raise ValueError(
            f"{part} of the layer spec is {getattr(module, '__name__', module)}, which is not supported for trees of "
            f"rollouts; use {names}"
        )
    return module


def _known_cores() -> tuple[type, ...]:
    """Megatron's own, and where Transformer Engine is installed also that one; Megatron has a stand-in where not."""
    found: Any = transformer_engine.TEDotProductAttention
    return (DotProductAttention, found) if isinstance(found, type) else (DotProductAttention,)


def branch_block_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """A stage of Megatron's local GPT layers with branch attention at their core."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = BranchNorm
    attention = spec.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = BranchNorm
    return TransformerBlockSubmodules(layer_specs=[adopt_spec(spec)] * layers, layer_norm=BranchNorm)
