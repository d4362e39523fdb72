"""Our own forward step: what a Megatron user's `forward_step_func` is, for a branch pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_branch.engine.spec import BranchParams
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.objective.logprobs import TokenScores
from megatron_branch.objective.losses import LossSums, token_loss
from megatron_branch.schedule.runner import PassInput


@dataclass(frozen=True)
class PassReport:
    """What a pass with loss tells: its sums, and the log-prob of each row of this rank `[n]`, detached."""

    sums: LossSums
    logp: Tensor


@dataclass(frozen=True)
class BranchForwardStep:
    """Runs the model on a pass; its loss function turns the head's scores into the pass's share of the step's loss.

    The loss is final: every weight already contains the step's denominator, so nothing may rescale it.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __call__(self, data_iterator: Iterator[PassInput], model: nn.Module) -> tuple[Any, Any]:
        """Megatron's signature: the output of `model` and a function of that output that returns (loss, report)."""
        current = next(data_iterator)
        tensors = current.tensors
        params = BranchParams(qkv_format="sbhd", unit=current.descriptor)
        output = model(tensors.input_ids, tensors.positions[None], None, packed_seq_params=params)

        def loss_function(scores: tuple[Tensor, Tensor | None]) -> tuple[Tensor, PassReport]:
            loss, sums = token_loss(TokenScores(*scores), tensors.table, self.objective)
            return loss, PassReport(sums, scores[0].detach())

        return output, loss_function


def total(reports: list[tuple[int, PassReport]], device: torch.device) -> LossSums:
    """Sums over the passes of this rank."""
    return sum((report.sums for _, report in reports), start=LossSums.zero(device))
