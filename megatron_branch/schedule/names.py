"""How an action is called in a printed schedule, a drawing and an error.

Always true:
- two different actions of one rank have different names.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action


def action_name(action: Action, units: Sequence[Unit]) -> str:
    """`C0.0`; `C3:0.0` (tree 3) where the rank has several trees."""
    if action.unit < 0:
        return action.text("")
    unit = units[action.unit]
    several = units[0].tree != units[-1].tree
    return action.text(f"{unit.tree}:{unit.label}" if several else unit.label)
