"""Who runs what in which slot.

Always true (`rules.assert_valid`):
- every unit has its slots exactly once, inside the window from the capture to the replay of each unit that it reads;
- both ends of a link see the same order of messages;
- a stage has at most as many tails in flight as there are stages from it to the last;
- a stage holds at most the state of the longest root-to-leaf path, and the retained graphs of one such path;
- no order waits for a message that is never sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.schedule.actions import Action, Phase
from megatron_branch.schedule.durations import Duration, token_durations


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
                order.append(Action("replay", unit.index, "backward" if unit.retained else "both"))

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


def longest_path_tokens(units: Sequence[Unit]) -> int:
    """State positions of the longest root-to-leaf path of captured units: what depth first holds at most."""
    return max((unit.context_tokens + (unit.tokens if _is_prefix(unit) else 0) for unit in units), default=0)


def largest_path_bytes(units: Sequence[Unit]) -> int:
    """Bytes of retained graphs on the root-to-leaf path that has most: what depth first holds at most."""
    if not any(unit.retained for unit in units):
        return 0
    return max(sum(units[prefix].retained_bytes for prefix in _path(unit)) for unit in units)


def _path(unit: Unit) -> tuple[int, ...]:
    """The captured units on its path, itself included."""
    return (*unit.context, unit.index) if _is_prefix(unit) else unit.context


def _is_prefix(unit: Unit) -> bool:
    return unit.kind == "prefix"


def touches(action: Action, units: Sequence[Unit]) -> tuple[int, ...]:
    """The prefix units whose state the action reads or writes."""
    if action.unit < 0:
        return ()
    return _path(units[action.unit])


def releases(order: Sequence[Action], units: Sequence[Unit]) -> tuple[tuple[int, ...], ...]:
    """For each slot, the prefix units whose state is released after it on this stage, last chunk first.

    That is the last slot that reads or writes the state: the unit's own replay, or, where it is not replayed (detached,
    scoring), the last slot of a unit that has it in its context.
    """
    last: dict[int, int] = {}
    for slot, action in enumerate(order):
        for prefix in touches(action, units):
            last[prefix] = slot
    freed: list[list[int]] = [[] for _ in order]
    for prefix in sorted(last, reverse=True):
        freed[last[prefix]].append(prefix)
    return tuple(tuple(prefixes) for prefixes in freed)


class _Stage:
    """One stage of the list scheduling: what it has done and what it may do next."""

    def __init__(self, units: Sequence[Unit], stage: int, stages: int) -> None:
        self.units = units
        self.last = stage == stages - 1
        self.tails_allowed = stages - stage
        self.tokens_allowed = longest_path_tokens(units)
        self.bytes_allowed = largest_path_bytes(units)
        self.final_order = depth_first(units)
        self.forwards = [unit.index for unit in units]
        self.backwards = [action for action in self.final_order if action.phase != "forward"]
        self.freed = releases(self.backwards, units)
        self.order: list[Action] = []
        self.forward_ends: list[float] = []
        self.backward_ends: list[float] = []
        self.free_at = 0.0
        self.tails = 0
        self.tokens = 0
        self.bytes = 0

    def choose(self, forward_ready: bool, backward_ready: bool) -> Action | None:
        """The next action whose message is there: the last stage depth first, the others backward first."""
        if self.last:
            if len(self.order) == len(self.final_order):
                return None
            action = self.final_order[len(self.order)]
            return action if action.kind == "replay" or forward_ready else None
        if backward_ready:
            action = self.backwards[len(self.backward_ends)]
            return Action("tail", action.unit, "backward") if action.kind == "tail" else action
        if not forward_ready:
            return None
        unit = self.units[self.forwards[len(self.forward_ends)]]
        if _is_prefix(unit):
            fits = self.tokens + unit.tokens <= self.tokens_allowed
            fits = fits and self.bytes + unit.retained_bytes <= self.bytes_allowed
            return Action("capture", unit.index, "forward") if fits else None
        return Action("tail", unit.index, "forward") if self.tails < self.tails_allowed else None

    def run(self, action: Action, end: float) -> None:
        """Take note of an action that ends at `end`."""
        self.order.append(action)
        self.free_at = end
        unit = self.units[action.unit]
        if action.kind != "replay" and action.phase != "backward":
            self.forward_ends.append(end)
            self.tokens += unit.tokens if _is_prefix(unit) else 0
            self.bytes += unit.retained_bytes
            self.tails += 0 if _is_prefix(unit) else 1
        if action.phase != "forward":
            for prefix in self.freed[len(self.backward_ends)]:
                self.tokens -= self.units[prefix].tokens
                self.bytes -= self.units[prefix].retained_bytes
            self.backward_ends.append(end)
            self.tails -= 0 if _is_prefix(unit) else 1


def pipeline_orders(
    units: Sequence[Unit], stages: int, *, duration: Duration | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Order per stage, by list scheduling in simulated time.

    The last stage runs `depth_first`. Every stage runs its forwards (captures, tails) in unit order and its backwards
    (tails, replays) in the order of the last stage, a backward as soon as its message is there. Forwards run ahead,
    also into the next tree, while at most `stages - s` tails are in flight on stage s, the captured state that is not
    yet released fits the longest root-to-leaf path, and the retained graphs fit the path that has most of them.

    This cannot deadlock. Let x be the forward that the last stage waits for. All that depth first puts before x is
    done there, so the backwards of it can run on every stage without any further forward. Once they have, take the
    first stage that has not yet run x, and its next forward y <= x in unit order, whose input is there. Every tail
    before y has had its backward, so no tail is in flight; every captured unit before y that is not yet released is an
    ancestor of x and, since units stand depth first, of y: the state with y is one path and fits, and so are the
    graphs. So y can run, and by induction x.

    Args:
        units: the units of one data-parallel rank.
        stages: number of pipeline stages.
        duration: predicted durations; by default proportional to tokens.
    """
    predict = duration or token_durations(units)
    pipeline = [_Stage(units, stage, stages) for stage in range(stages)]
    wakes = [(0.0, stage) for stage in range(stages)]
    while wakes:
        now, number = heapq.heappop(wakes)
        stage = pipeline[number]
        if stage.free_at > now:
            continue
        forward, backward = len(stage.forward_ends), len(stage.backward_ends)
        forward_ready = forward < len(units) and (number == 0 or _done(pipeline[number - 1].forward_ends, forward, now))
        backward_ready = number + 1 < stages and _done(pipeline[number + 1].backward_ends, backward, now)
        action = stage.choose(forward_ready, backward_ready)
        if action is None:
            continue
        end = now + predict(action, number)
        stage.run(action, end)
        for woken in (number - 1, number, number + 1):
            if 0 <= woken < stages:
                heapq.heappush(wakes, (end, woken))
    orders = tuple(tuple(stage.order) for stage in pipeline)
    assert all(len(stage.backward_ends) == len(stage.backwards) for stage in pipeline), "the list scheduling got stuck"
    return orders


def training_orders(plan: Plan, rank: int, stages: int) -> tuple[tuple[Action, ...], ...]:
    """`pipeline_orders` of a data-parallel rank, with durations that follow the plan."""
    units = plan.ranks[rank].units
    return pipeline_orders(units, stages, duration=token_durations(units, recompute_layers=plan.recompute_layers))


def _done(ends: Sequence[float], index: int, now: float) -> bool:
    return index < len(ends) and ends[index] <= now


def scoring_orders(units: Sequence[Unit], stages: int) -> tuple[tuple[Action, ...], ...]:
    """Order per stage of a pass that only scores: every unit forward, in unit order."""
    order = tuple(Action("capture" if _is_prefix(unit) else "tail", unit.index, "forward") for unit in units)
    return (order,) * stages


def match_passes(orders: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Pad the orders of data-parallel ranks with idles until slot i is the same kind of pass on every rank.

    A pass is forward only (`forward`) or forward and backward (`both`); no unit is retained. The slots are a common
    supersequence of the ranks' passes, by weighted majority merge: each slot is the kind for which the ranks that can
    use it have most left.

    Args:
        orders: one order per data-parallel rank, of a single pipeline stage each; an order may be empty.
    """
    taken = [0] * len(orders)
    matched: list[list[Action]] = [[] for _ in orders]
    while any(taken[rank] < len(order) for rank, order in enumerate(orders)):
        weight: dict[Phase, int] = {"forward": 0, "both": 0}
        for rank, order in enumerate(orders):
            if taken[rank] < len(order):
                weight[order[taken[rank]].phase] += len(order) - taken[rank]
        phase: Phase = "forward" if weight["forward"] >= weight["both"] else "both"
        for rank, order in enumerate(orders):
            if taken[rank] < len(order) and order[taken[rank]].phase == phase:
                matched[rank].append(order[taken[rank]])
                taken[rank] += 1
            else:
                matched[rank].append(Action("idle", -1, phase))
    return tuple(tuple(order) for order in matched)
