"""How long an action takes, in arbitrary units, for building and simulating orders.

Always true:
- a duration is positive and the same on every rank;
- a backward takes twice its forward, or what `plan/cost.py` says where the model is known;
- a backward that recomputes its layers (of tails, and of replays of units that are not retained) takes a forward more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_branch.plan.cost import LINEAR_BACKWARD, ModelShape, unit_flops
from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action

Duration = Callable[[Action, int], float]
"""Duration of an action on a stage."""


def token_durations(units: Sequence[Unit], *, recompute_layers: bool = False) -> Duration:
    """Forward one unit per token, backward two; the context is not counted. An idle is free."""
    passes = {"forward": 1.0, "backward": 2.0, "both": 3.0}

    def duration(action: Action, stage: int) -> float:
        if action.unit < 0:
            return 0.0
        unit = units[action.unit]
        again = recompute_layers and action.phase != "forward" and not unit.retained
        return (passes[action.phase] + int(again)) * unit.tokens

    return duration


def flop_durations(
    units: Sequence[Unit],
    shape: ModelShape,
    *,
    stages: int,
    loss_rows: Sequence[int] | None = None,
    recompute_layers: bool = False,
) -> Duration:
    """FLOPs of a stage that holds `1 / stages` of the layers; the head is on the last stage.

    Args:
        units: the units of the rank.
        shape: sizes of the model.
        stages: number of pipeline stages.
        loss_rows: per unit, positions at which the head runs; None leaves the head out.
        recompute_layers: see `Plan`.
    """
    head_rows = loss_rows or [0] * len(units)

    def duration(action: Action, stage: int) -> float:
        if action.unit < 0:
            return 0.0
        unit = units[action.unit]
        forward = unit_flops(unit, shape, phase="capture") / stages
        again = recompute_layers and not unit.retained
        both = unit_flops(unit, shape, phase="tail", recompute_layers=again) / stages
        passes = {"forward": forward, "backward": both - forward, "both": both}
        head = 0.0
        if stage == stages - 1 and (action.kind != "capture" or unit.retained):
            heads = {"forward": 1.0, "backward": LINEAR_BACKWARD, "both": 1 + LINEAR_BACKWARD}
            head = head_rows[unit.index] * shape.head_flops * heads[action.phase]
        return passes[action.phase] + head

    return duration
