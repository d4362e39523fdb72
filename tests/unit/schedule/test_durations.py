"""Predicted durations."""

from __future__ import annotations

import pytest

from megatron_branch.plan.cost import training_flops
from megatron_branch.plan.limits import BranchConfig
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


@pytest.mark.parametrize("layers", [False, True], ids=["", "layers"])
@pytest.mark.parametrize("activations", ["recompute", "retain"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_together_run_the_flops_of_the_plan(stages: int, activations: str, layers: bool) -> None:
    rows = [*prompt_with_tails(9, [4, 2]), *prompt_with_tails(3, [1])]
    rows[0].loss_mask[5] = True  # the head runs in the prefix
    config = BranchConfig.model_validate({"activations": activations, "recompute_layers": layers})
    plan, trees = planned(rows, config=config)
    units = plan.ranks[0].units
    heads = [len(loss_rows(unit, trees, rows).rows) for unit in units]
    duration = flop_durations(units, SHAPE, stages=stages, loss_rows=heads, recompute_layers=layers)
    orders = pipeline_orders(units, stages, duration=duration)
    total = sum(duration(action, stage) for stage, order in enumerate(orders) for action in order)
    # Every term is a multiple of FLOPs / stages with stages a power of two: exact.
    pairs = zip(units, heads, strict=True)
    assert total == sum(training_flops(unit, SHAPE, rows=head, recompute_layers=layers) for unit, head in pairs)


def test_a_retained_replay_takes_a_backward() -> None:
    plan, _ = planned(prompt_with_tails(9, [4]), config=BranchConfig(chunk_tokens=4, activations="retain"))
    units = plan.ranks[0].units
    for layers, tail in ((False, 3.0), (True, 4.0)):
        duration = token_durations(units, recompute_layers=layers)
        times = [duration(action, 0) / units[action.unit].tokens for action in pipeline_orders(units, 1)[0]]
        assert times == [1.0, 1.0, tail, 2.0, 2.0]
