"""Our own forward step: what a Megatron user's `forward_step_func` is, for a branch pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_branch.engine.pass_batch import PassBatch
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.objective.logprobs import TokenScores
from megatron_branch.objective.losses import LossSums, LossTable, token_loss


@dataclass(frozen=True)
class PassReport:
    """What a pass with loss tells: its unit, its sums, and the log-prob of each row of this rank `[n]`, detached."""

    unit: int
    sums: LossSums
    logp: Tensor


@dataclass(frozen=True)
class BranchForwardStep:
    """Runs the model on a pass; its loss function turns the head's scores into the pass's share of the step's loss.

    The loss is final: every weight already contains the step's denominator, so nothing may rescale it.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __call__(self, data_iterator: Iterator[PassBatch], model: nn.Module) -> tuple[Any, Any]:
        """Megatron's signature: the output of `model` and a function of that output that returns (loss, report)."""
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=batch["packed_seq_params"])
        table = LossTable(
            entry_row=batch["entry_row"],
            weight_E=batch["weight"],
            advantage_E=batch["advantage"],
            old_logp_E=batch["old_logprobs"],
            ref_logp_E=batch["ref_logprobs"],
        )

        def loss_function(scores: tuple[Tensor, Tensor | None]) -> tuple[Tensor, PassReport]:
            loss, sums = token_loss(TokenScores(*scores), table, self.objective)
            return loss, PassReport(batch["unit"], sums, scores[0].detach())

        return output, loss_function


def total(reports: list[PassReport], device: torch.device) -> LossSums:
    """Sums over the passes of this rank."""
    return sum((report.sums for report in reports), start=LossSums.zero(device))
