"""Who runs what in which slot.

Always true (`rules.assert_valid`):
- every unit has its slots exactly once, inside the window from the capture to the replay of each unit that it reads;
- both ends of a link see the same order of messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action


def depth_first(units: Sequence[Unit]) -> tuple[Action, ...]:
    """Order of a single stage: captures on the way down, tails, and each replay right after its last descendant.

    `C0.0 C0.1 T0.0 T0.1 R0.1 R0.0`. Holds the state of one root-to-leaf path at a time.
    """
    order: list[Action] = []
    path: list[Unit] = []

    def close(depth: int) -> None:
        while len(path) > depth:
            unit = path.pop()
            if unit.replayed:
                order.append(Action("replay", unit.index, "both"))

    for unit in units:
        shared = 0
        while shared < min(len(path), len(unit.context)) and path[shared].index == unit.context[shared]:
            shared += 1
        close(shared)
        if unit.kind == "prefix":
            order.append(Action("capture", unit.index, "forward"))
            path.append(unit)
        else:
            order.append(Action("tail", unit.index, "both"))
    close(0)
    return tuple(order)
