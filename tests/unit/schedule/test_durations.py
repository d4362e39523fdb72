"""Predicted durations."""

from __future__ import annotations

import pytest

from megatron_branch.plan.cost import training_flops
from megatron_branch.plan.tables import loss_rows
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.durations import flop_durations, token_durations
from megatron_branch.schedule.orders import pipeline_orders
from tests.branching import SHAPE, planned, prompt_with_tails


def test_tokens_count_once_forward_and_twice_backward() -> None:
    plan, _ = planned(prompt_with_tails(9, [4]))
    (unit,) = plan.ranks[0].units
    duration = token_durations(plan.ranks[0].units)
    phases = {phase: duration(Action("tail", 0, phase), 0) for phase in ("forward", "backward", "both")}  # type: ignore[arg-type]
    assert phases == {"forward": unit.tokens, "backward": 2 * unit.tokens, "both": 3 * unit.tokens}
    assert duration(Action("idle", -1, "both"), 0) == 0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_together_run_the_flops_of_the_plan(stages: int) -> None:
    rows = [*prompt_with_tails(9, [4, 2]), *prompt_with_tails(3, [1])]
    plan, trees = planned(rows)
    units = plan.ranks[0].units
    heads = [len(loss_rows(unit, trees, rows).rows) for unit in units]
    duration = flop_durations(units, SHAPE, stages=stages, loss_rows=heads)
    orders = pipeline_orders(units, stages, duration=duration)
    total = sum(duration(action, stage) for stage, order in enumerate(orders) for action in order)
    # Every term is a multiple of FLOPs / stages with stages a power of two: exact.
    assert total == sum(training_flops(unit, SHAPE, rows=head) for unit, head in zip(units, heads, strict=True))
