"""Baseline: a whole tree as one packed row under a dense mask, forwarded and backpropagated once.

The way of single-pass systems: every node's tokens once, a [T, T] mask that shows each token its ancestors and,
causally, its own node. Exact, no replay; but its activations and its mask grow with the whole tree, it computes every
masked score, and a tree cannot span two passes. It runs on the same model, head and loss as the schedule, on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_branch.attention.descriptor import HeadRows, PassDescriptor
from megatron_branch.attention.kernel import Saved
from megatron_branch.engine.forward_step import BranchForwardStep, PassReport
from megatron_branch.engine.pass_batch import pass_batch
from megatron_branch.engine.planner import PlannedStep
from megatron_branch.engine.worker import Worker
from megatron_branch.objective.losses import LossTable
from megatron_branch.plan.cost import ATTENTION_BACKWARD, LINEAR_BACKWARD
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.shard import shard_unit
from megatron_branch.schedule.runner import PassInput, UnitTensors


@dataclass(frozen=True)
class MaskedCpu:
    """The CPU's flash attention under an additive mask `[1, 1, T, T]` of 0 and -inf; one call covers the whole row."""

    mask: Tensor

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """See `attention.kernel.Kernel`; `causal` is in the mask."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_PGD, v_PGD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=self.mask, scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attention.kernel.Kernel`."""
        q, k, v, out, lse = (x.transpose(0, 1)[None] for x in saved)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_THD.transpose(0, 1)[None], q, k, v, out, lse, 0.0, False, attn_mask=self.mask, scale=scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def tree_mask(units: Sequence[Unit], dtype: torch.dtype) -> Tensor:
    """Additive mask `[1, 1, T, T]` of the units' segments laid end to end.

    A token sees the segments of its unit's context whole, and its own segment up to itself.
    """
    starts: list[list[int]] = []
    total = 0
    for unit in units:
        starts.append([])
        for segment in unit.segments:
            starts[-1].append(total)
            total += segment.tokens
    seen = torch.zeros(total, total, dtype=torch.bool)
    for unit, offsets in zip(units, starts, strict=True):
        for segment, start in zip(unit.segments, offsets, strict=True):
            own = slice(start, start + segment.tokens)
            seen[own, own] = torch.ones(segment.tokens, segment.tokens, dtype=torch.bool).tril()
            for index in unit.context:
                first = starts[index][0]
                seen[own, first : first + units[index].tokens] = True
    return torch.zeros(total, total, dtype=dtype).masked_fill_(~seen, float("-inf"))[None, None]


class PackedStep:
    """A planned step of one tree, as one pass.

    Args:
        worker: on one rank.
        step: planned in exact mode, without a chunk limit or with one: chunks are joined again.
    """

    def __init__(self, worker: Worker, step: PlannedStep) -> None:
        assert len(step.trees) == 1 and worker.groups.model.size == worker.groups.dp_cp.size == 1
        self._worker, self._step = worker, step
        parts = [step.batch.tensors(unit.index) for unit in step.units]
        offsets = torch.tensor([0, *(unit.tokens for unit in step.units)]).cumsum(0).tolist()
        tokens = offsets.pop()
        shard = shard_unit((tokens,), cp=1, rank=0)
        self._tensors = UnitTensors(
            input_ids=torch.cat([part.input_ids for part in parts], 1),
            positions=torch.cat([part.positions for part in parts]),
            shard=shard,
            attended=shard,
            rows=tokens,
            head=_join_heads(parts, offsets),
            table=_join_tables(parts),
        )
        dtype = next(worker.model.parameters()).dtype
        self._kernel = MaskedCpu(tree_mask(step.units, dtype))

    def flops(self) -> float:
        """What it runs: every token once, forward and backward, and every score of the mask, seen or not."""
        shape, plan, tokens = self._worker.arch.shape(), self._step.plan, self._tensors.shard.tokens
        linear = tokens * shape.linear_flops + plan.loss_tokens * shape.head_flops
        return linear * (1 + LINEAR_BACKWARD) + tokens**2 * shape.pair_flops * (1 + ATTENTION_BACKWARD)

    def run(self) -> PassReport:
        """Forward and backward; gradients accumulate in the parameters."""
        worker, tensors = self._worker, self._tensors
        descriptor = PassDescriptor(
            positions=tensors.positions, shard=tensors.shard, context=(), kernel=self._kernel, head=tensors.head
        )
        forward_step = BranchForwardStep(worker.config.objective)
        output, loss_function = forward_step(iter((pass_batch(PassInput(None, tensors, descriptor)),)), worker.model)
        loss, report = loss_function(output)
        (loss * worker.runtime.loss_scale).backward()
        return report


def _join_heads(parts: Sequence[UnitTensors], offsets: Sequence[int]) -> HeadRows:
    heads = [(part.head, offset) for part, offset in zip(parts, offsets, strict=True) if part.head is not None]
    return HeadRows(
        torch.cat([head.offsets + offset for head, offset in heads]), torch.cat([head.targets for head, _ in heads])
    )


def _join_tables(parts: Sequence[UnitTensors]) -> LossTable:
    tables: list[LossTable] = []
    rows = 0
    for part in parts:
        if part.head is not None:
            tables.append(replace(part.table, entry_row=part.table.entry_row + rows))
            rows += part.head.offsets.shape[0]
    names = ("entry_row", "weight_E", "advantage_E", "old_logp_E")
    return LossTable(**{name: torch.cat([getattr(table, name) for table in tables]) for name in names})
