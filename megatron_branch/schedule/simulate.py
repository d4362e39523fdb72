"""Runs orders in simulated time, and shows a real run in the same form.

Always true:
- an action starts when its stage is free and its message is there, in the order of its stage;
- `busy` is the sum of a stage's spans, and `bubble_fraction` is the idle share of all stages up to the makespan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.durations import Duration, token_durations
from megatron_branch.schedule.names import action_name
from megatron_branch.schedule.orders import releases


@dataclass(frozen=True, slots=True)
class Span:
    """One slot in time; `name` is what the printed schedule shows."""

    stage: int
    slot: int
    start: float
    end: float
    action: Action
    name: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome; times in the unit of the durations.

    Attributes:
        makespan: end of the last action.
        bubble_fraction: share of `stages * makespan` in which a stage does nothing; 0 without work.
        busy: per stage, time spent in actions.
        peak_state_tokens: per stage, most positions of captured state held at once.
        peak_retained_bytes: per stage, most bytes of retained graphs held at once, as the plan counts them.
        spans: by stage, then slot.
    """

    makespan: float
    bubble_fraction: float
    busy: tuple[float, ...]
    peak_state_tokens: tuple[int, ...]
    peak_retained_bytes: tuple[int, ...]
    spans: tuple[Span, ...]


def sends_forward(action: Action) -> bool:
    """Its hidden states go to the next stage."""
    return action.kind == "capture" or (action.kind == "tail" and action.phase != "backward")


def sends_backward(action: Action) -> bool:
    """Its hidden gradient goes to the previous stage."""
    return action.kind == "replay" or (action.kind == "tail" and action.phase != "forward")


def simulate(
    orders: Sequence[Sequence[Action]], units: Sequence[Unit], *, duration: Duration | None = None
) -> Simulation:
    """Simulate the stages of one data-parallel rank; sends do not block.

    Args:
        orders: one order per pipeline stage.
        units: the units of the rank.
        duration: duration of an action on a stage; by default proportional to tokens.

    Raises:
        AssertionError: the orders wait for each other.
    """
    predict = duration or token_durations(units)
    last = len(orders) - 1
    forward_ends: list[dict[int, float]] = [{} for _ in orders]
    backward_ends: list[dict[int, float]] = [{} for _ in orders]
    spans: list[list[Span]] = [[] for _ in orders]

    def arrival(stage: int, action: Action) -> float | None:
        """When what the action waits for is there, None when not yet known."""
        if sends_forward(action) and stage > 0:
            return forward_ends[stage - 1].get(action.unit)
        if sends_backward(action) and stage < last:
            return backward_ends[stage + 1].get(action.unit)
        return 0.0

    def advance(stage: int) -> bool:
        """Run the stage as far as known arrivals allow; True when it ran anything."""
        before = len(spans[stage])
        for slot in range(before, len(orders[stage])):
            action = orders[stage][slot]
            ready = arrival(stage, action)
            if ready is None:
                break
            start = max(ready, spans[stage][-1].end if slot else 0.0)
            end = start + predict(action, stage)
            spans[stage].append(Span(stage, slot, start, end, action, action_name(action, units)))
            if sends_forward(action):
                forward_ends[stage][action.unit] = end
            if sends_backward(action):
                backward_ends[stage][action.unit] = end
        return len(spans[stage]) > before

    while any([advance(stage) for stage in range(len(orders))]):
        pass
    for stage, order in enumerate(orders):
        ran = len(spans[stage])
        assert ran == len(order), f"stage {stage} waits forever at slot {ran}, {action_name(order[ran], units)}"
    return _summary(orders, units, spans)


def recorded(
    orders: Sequence[Sequence[Action]], units: Sequence[Unit], times: Sequence[Sequence[tuple[float, float]]]
) -> Simulation:
    """A run that was measured, in the form of a simulation.

    An action's time holds its waiting for messages and for the other ranks of its stage, so the bubble of a recorded
    run is only what lies between actions.

    Args:
        orders: one order per pipeline stage.
        units: the units of the rank.
        times: per stage, start and end of each action that is not an idle, in seconds since the step began.
    """
    spans: list[list[Span]] = []
    for stage, (order, measured) in enumerate(zip(orders, times, strict=True)):
        slots = [slot for slot, action in enumerate(order) if action.kind != "idle"]
        spans.append(
            [
                Span(stage, slot, start, end, order[slot], action_name(order[slot], units))
                for slot, (start, end) in zip(slots, measured, strict=True)
            ]
        )
    return _summary(orders, units, spans)


def _summary(orders: Sequence[Sequence[Action]], units: Sequence[Unit], spans: Sequence[Sequence[Span]]) -> Simulation:
    makespan = max((span.end for stage in spans for span in stage), default=0.0)
    busy = tuple(sum(span.end - span.start for span in stage) for stage in spans)
    available = makespan * len(orders)
    return Simulation(
        makespan=makespan,
        bubble_fraction=1 - sum(busy) / available if available else 0.0,
        busy=busy,
        peak_state_tokens=tuple(peak_state_tokens(order, units) for order in orders),
        peak_retained_bytes=tuple(peak_retained_bytes(order, units) for order in orders),
        spans=tuple(span for stage in spans for span in stage),
    )


def peak_state_tokens(order: Sequence[Action], units: Sequence[Unit]) -> int:
    """Most positions of captured state that a stage holds at once."""
    return _peak(order, units, lambda unit: unit.tokens)


def peak_retained_bytes(order: Sequence[Action], units: Sequence[Unit]) -> int:
    """Most bytes of retained graphs that a stage holds at once in a training order."""
    return _peak(order, units, lambda unit: unit.retained_bytes)


def _peak(order: Sequence[Action], units: Sequence[Unit], size: Callable[[Unit], int]) -> int:
    held = peak = 0
    for action, freed in zip(order, releases(order, units), strict=True):
        held += size(units[action.unit]) if action.kind == "capture" else 0
        peak = max(peak, held)
        held -= sum(size(units[prefix]) for prefix in freed)
    return peak
