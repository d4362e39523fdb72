"""What a `forward_step_func` is given for one pass of a step that shares prefixes."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from megatron_branch.engine.spec import BranchParams
from megatron_branch.schedule.runner import PassInput


class PassBatch(TypedDict):
    """One pass: t tokens of this context-parallel rank, padding included, and E entries.

    An entry is one trained token of one rollout. A position that several rollouts train has as many entries, each with
    its own advantage and old log-prob. The loss of a step is a sum over entries, whatever the passes.

    Attributes:
        tokens: int64 `[1, t]`.
        position_ids: absolute, int64 `[1, t]`.
        attention_mask: None.
        labels: the token that each position predicts, int64 `[1, t]`; 0 where none is trained.
        loss_mask: number of rollouts that train the position's label, float32 `[1, t]`.
        packed_seq_params: must be handed to the model.
        entry_offset: position of the entry among the t, int64 `[E]`.
        entry_row: position of the entry among those with `loss_mask` > 0, int64 `[E]`.
        weight: of the entry in the step's loss, float64 `[E]`; the step's denominator is in it.
        advantage: float64 `[E]`.
        old_logprobs: in nats, float64 `[E]`; NaN where the rollout has none.
        ref_logprobs: of the reference policy, likewise; None where a rollout of the pass has none.
        unit: index of the pass's unit among those of this data-parallel rank; -1 for an idle pass.
    """

    tokens: Tensor
    position_ids: Tensor
    attention_mask: None
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: BranchParams
    entry_offset: Tensor
    entry_row: Tensor
    weight: Tensor
    advantage: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    unit: int


def pass_batch(current: PassInput) -> PassBatch:
    """The batch of a pass; one without trained positions has no entries."""
    tensors, unit = current.tensors, current.unit
    labels = torch.zeros_like(tensors.input_ids)
    loss_mask = torch.zeros(labels.shape, device=labels.device)
    rows = offsets = labels.new_zeros(0)
    weight = advantage = old = loss_mask.new_zeros(0, dtype=torch.float64)
    reference: Tensor | None = None
    if tensors.head is not None:
        table = tensors.table
        rows, offsets = table.entry_row, tensors.head.offsets[table.entry_row]
        weight, advantage, old, reference = table.weight_E, table.advantage_E, table.old_logp_E, table.ref_logp_E
        labels[0, tensors.head.offsets] = tensors.head.targets
        loss_mask[0].index_add_(0, offsets, torch.ones(len(offsets), device=labels.device))
    return PassBatch(
        tokens=tensors.input_ids,
        position_ids=tensors.positions[None],
        attention_mask=None,
        labels=labels,
        loss_mask=loss_mask,
        packed_seq_params=BranchParams(qkv_format="sbhd", unit=current.descriptor),
        entry_offset=offsets,
        entry_row=rows,
        weight=weight,
        advantage=advantage,
        old_logprobs=old,
        ref_logprobs=reference,
        unit=-1 if unit is None else unit.index,
    )
