"""Transformers as a host: a model's own Hugging Face modules, with branch attention through `AttentionInterface`.

The pass travels as a keyword argument of the model call, which Hugging Face's decoders hand on to the attention
function. Rotary positions come from `position_ids`. No attention mask is made for an attention function that has no
mask function registered, and one that arrives in spite of it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from megatron_branch.attention.branch import branch_attention, leave_state
from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.megatron_host import LossFunction
from megatron_branch.engine.model import LogProbHead
from megatron_branch.engine.spec import BranchParams
from megatron_branch.objective.logprobs import HeadSettings

ATTENTION = "megatron_branch"
# Arguments that decoders hand on to any attention function and that change nothing here.
_IDLE = frozenset({"position_ids", "use_cache", "cache_position", "is_causal", "position_embeddings"})


class TransformersModel(nn.Module):
    """A Hugging Face model that returns `(logp [n], entropy [n] or None)` at the pass's head rows.

    Of a pass without head it returns the hidden states `[1, t, hidden]`.

    Attributes:
        hf: the model.
        head: log-probs, with the model's own factor of its logits in the temperature.
        logit_factor: see `TransformersModules`.
    """

    def __init__(self, hf: Any, head: HeadSettings, logit_factor: float) -> None:
        super().__init__()
        self.hf = hf
        self.head = LogProbHead(replace(head, temperature=head.temperature / logit_factor), None)
        self.logit_factor = logit_factor

    def hidden(self, input_ids: Tensor, position_ids: Tensor, unit: PassDescriptor) -> Tensor:
        """Normalised hidden states `[1, t, hidden]` of tokens `[1, t]` at absolute positions `[1, t]`."""
        output = self.hf.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, branch_pass=_Carried(unit)
        )
        return output.last_hidden_state

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: None, *, packed_seq_params: BranchParams
    ) -> Any:
        """The arguments of a forward step; see the class."""
        unit = packed_seq_params.pass_descriptor
        hidden = self.hidden(input_ids, position_ids, unit)
        if unit.head is None:
            return hidden
        return self.head(hidden[0, unit.head.offsets], self.hf.get_output_embeddings().weight, unit.head.targets)


class TransformersHost:
    """What is done around a step's passes: nothing, since there is one stage and the optimizer's engine reduces."""

    @contextmanager
    def step(self, *, forward_only: bool) -> Iterator[None]:
        """Around all passes of a step."""
        yield

    def set_input(self, stage_input: Tensor | None) -> None:
        """There is no stage before."""
        assert stage_input is None

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """The model sees for itself that a pass has no head."""
        yield

    def final(self, loss_function: LossFunction) -> LossFunction:
        """Losses are final."""
        return loss_function


class _Carried:
    """The pass, in a form that model code that looks into its arguments takes for an opaque value."""

    def __init__(self, unit: PassDescriptor) -> None:
        self.unit = unit


def build_transformers_model(
    arch: Architecture, config: PretrainedConfig, *, dtype: torch.dtype, head: HeadSettings, device: torch.device
) -> TransformersModel:
    """The whole model, weights not yet loaded.

    Args:
        arch: with `transformers` set.
        config: of the model; left as it is.
        dtype: of the weights; tables of rotary positions keep the precision that Hugging Face gives them.
        head: how logits become log-probs.
        device: where the weights live.
    """
    assert arch.transformers is not None
    AttentionInterface.register(ATTENTION, _attention)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION)
    model.tie_weights()  # left out together with the initialisation
    return TransformersModel(model.eval(), head, arch.transformers.logit_factor)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    branch_pass: _Carried | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention function: query `[1, H, t, D]`, key and value `[1, G, t, D]` -> `[1, t, H, D]`.

    Raises:
        ValueError: an argument asks for what branch attention does not compute.
    """
    unknown = {name: given for name, given in others.items() if name not in _IDLE and given not in (None, False)}
    unknown |= {"attention_mask": attention_mask} if attention_mask is not None else {}
    unknown |= {"dropout": dropout} if dropout else {}
    name = type(module).__name__
    if unknown:
        listed = ", ".join(sorted(unknown))
        raise ValueError(
            f"{name} gives its attention function {listed}, which model.host=transformers does not compute"
        )
    if branch_pass is None:
        raise ValueError(f"{name} does not hand on keyword arguments to its attention function; use another model")
    if value.shape != key.shape:
        raise ValueError(f"{name}: values of other shape than keys are not supported with model.host=transformers")
    unit, layer = branch_pass.unit, int(module.layer_idx) + 1  # pages count layers from 1
    q_tHD, k_tGD, v_tGD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    if unit.state_only and layer == module.config.num_hidden_layers:
        leave_state(k_tGD, v_tGD, unit, layer)
        return torch.zeros_like(q_tHD)[None], None  # nothing reads what follows
    return branch_attention(q_tHD, k_tGD, v_tGD, unit, layer, scale=scaling)[None], None
