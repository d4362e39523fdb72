"""What must hold for every order, whoever made it.

Always true:
- an order that passes runs to its end with sends that do not block, at any durations;
- the message of a failed rule names the action, its slot and its stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.names import action_name
from megatron_branch.schedule.orders import largest_path_bytes, longest_path_tokens
from megatron_branch.schedule.simulate import (
    peak_retained_bytes,
    peak_state_tokens,
    sends_backward,
    sends_forward,
    simulate,
)


def assert_valid(orders: Sequence[Sequence[Action]], units: Sequence[Unit], *, scoring: bool = False) -> None:
    """Check the orders of all pipeline stages of one data-parallel rank.

    Args:
        orders: one order per stage; idles are allowed anywhere.
        units: the units of the rank.
        scoring: forward passes only.

    Raises:
        AssertionError: naming the action and the rule.
    """
    for stage, order in enumerate(orders):
        where = f"stage {stage}: " if len(orders) > 1 else ""
        _assert_complete(order, _expected(units, last=stage == len(orders) - 1, scoring=scoring), units, where)
        _assert_windows(order, units, where)
        _assert_halves(order, units, len(orders) - stage, where)
        held, allowed = peak_state_tokens(order, units), longest_path_tokens(units)
        assert held <= allowed, f"{where}holds the state of {held} tokens, the longest path has {allowed}"
        held, allowed = (0, 0) if scoring else (peak_retained_bytes(order, units), largest_path_bytes(units))
        assert held <= allowed, f"{where}holds {held} bytes of graphs, the path with most has {allowed}"
    for stage in range(len(orders) - 1):
        _assert_link(orders, units, stage)
    simulate(orders, units)


def _expected(units: Sequence[Unit], *, last: bool, scoring: bool) -> Counter[Action]:
    """The slots of a stage, idles aside."""
    slots: Counter[Action] = Counter()
    for unit in units:
        if unit.kind == "prefix":
            slots[Action("capture", unit.index, "forward")] += 1
            replay = Action("replay", unit.index, "backward" if unit.retained else "both")
            slots[replay] += int(unit.replayed and not scoring)
        elif scoring:
            slots[Action("tail", unit.index, "forward")] += 1
        elif last:
            slots[Action("tail", unit.index, "both")] += 1
        else:
            slots[Action("tail", unit.index, "forward")] += 1
            slots[Action("tail", unit.index, "backward")] += 1
    return +slots


def _assert_complete(order: Sequence[Action], expected: Counter[Action], units: Sequence[Unit], where: str) -> None:
    for action in order:
        if action.kind == "idle":
            assert action.unit == -1 and action.phase in ("forward", "both"), f"{where}{action} is no idle pass"
    found = Counter(action for action in order if action.kind != "idle")
    for action in found | expected:
        assert 0 <= action.unit < len(units), f"{where}{action.kind} of unit {action.unit}, there are {len(units)}"
        name = f"{action_name(action, units)} ({action.phase})"
        times, wanted = found[action], expected[action]
        assert times == wanted, f"{where}{name} has {times} slots instead of {wanted}"


def _assert_windows(order: Sequence[Action], units: Sequence[Unit], where: str) -> None:
    """Every action lies between the capture and the replay of each unit that it reads."""
    captures = {action.unit: slot for slot, action in enumerate(order) if action.kind == "capture"}
    replays = {action.unit: slot for slot, action in enumerate(order) if action.kind == "replay"}
    for slot, action in enumerate(order):
        if action.kind == "idle":
            continue
        for prefix in units[action.unit].context:
            opens, closes = captures[prefix], replays.get(prefix, len(order))
            window = f"{action_name(order[opens], units)}@{opens} .. "
            window += f"{action_name(order[closes], units)}@{closes}" if closes < len(order) else "end"
            inside = opens < slot < closes
            assert inside, f"{where}{action_name(action, units)} at slot {slot} is outside its prefix window {window}"


def _assert_halves(order: Sequence[Action], units: Sequence[Unit], tails_allowed: int, where: str) -> None:
    """A replay after its own capture, the backward of a tail after its forward, and few tails between."""
    begun: set[int] = set()
    tails = 0
    splits = any(action.kind == "tail" and action.phase == "backward" for action in order)
    for slot, action in enumerate(order):
        place = f"{where}{action_name(action, units)} at slot {slot}"
        if action.kind == "replay" or (action.kind == "tail" and action.phase == "backward"):
            assert action.unit in begun, f"{place} stands before its forward"
            tails -= int(action.kind == "tail")
        elif action.kind != "idle":
            begun.add(action.unit)
            tails += int(splits and action.kind == "tail")
            assert tails <= tails_allowed, f"{place} makes {tails} tails in flight, {tails_allowed} are allowed"


def _assert_link(orders: Sequence[Sequence[Action]], units: Sequence[Unit], stage: int) -> None:
    """Both ends of the link from `stage` to the next send and receive in one order."""
    for direction, sends in (("forward", sends_forward), ("backward", sends_backward)):
        here, there = ([action for action in orders[end] if sends(action)] for end in (stage, stage + 1))
        for place, (near, far) in enumerate(zip(here, there, strict=True)):
            names = f"{action_name(near, units)} on stage {stage}, {action_name(far, units)} on stage {stage + 1}"
            assert near.unit == far.unit, f"{direction} message {place} of the link is {names}"


def assert_matched(orders: Sequence[Sequence[Action]]) -> None:
    """Check that slot i is the same kind of pass on every data-parallel rank.

    Raises:
        AssertionError: naming the rank and the slot.
    """
    for rank, order in enumerate(orders):
        assert len(order) == len(orders[0]), f"rank {rank} has {len(order)} slots, rank 0 has {len(orders[0])}"
        for slot, (action, first) in enumerate(zip(order, orders[0], strict=True)):
            same = action.phase == first.phase
            assert same, f"slot {slot} is a {action.phase} pass on rank {rank}, a {first.phase} pass on rank 0"
