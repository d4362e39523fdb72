"""Wall time of a step by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_branch.tracking.metrics import PHASES


class Timers:
    """Seconds by phase since the last `take`: `with timers("capture"): ...`.

    Phases may nest (`step` holds others); a phase does not nest in itself. A block only takes a mark when it starts and
    when it ends: it never waits for a device, because a stage that waited for its pending sends could keep the next
    stage from receiving. With device events as marks, `take` reads them once the step is over.
    """

    def __init__(
        self,
        mark: Callable[[], Any] = time.monotonic,
        *,
        seconds: Callable[[Any, Any], float] = lambda start, end: end - start,
    ) -> None:
        """`mark` notes a moment, `seconds` is the time between two of them; it is called in `take` only."""
        self._mark, self._between = mark, seconds
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._open: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block's time under `phase`, also when it raises."""
        assert phase in PHASES, f"phase {phase!r} is not declared: {', '.join(PHASES)}"
        assert phase not in self._open, f"phase {phase!r} is already being timed"
        self._open.add(phase)
        start = self._mark()
        try:
            yield
        finally:
            self._open.discard(phase)
            self._spans.setdefault(phase, []).append((start, self._mark()))

    def spans(self, phases: Collection[str], *, since: str) -> list[tuple[float, float]]:
        """Start and end of every block of these phases since the last `take`, in the order they started.

        Seconds after the first block of the phase `since` started; like `take` for when a step is over.
        """
        origin = self._spans[since][0][0]
        seconds = [
            (self._between(origin, start), self._between(origin, end))
            for phase in phases
            for start, end in self._spans.get(phase, ())
        ]
        return sorted(seconds)

    def take(self) -> dict[str, float]:
        """Seconds by metric key (`timing_s/PHASE`) of the phases that ran; starts again from zero."""
        spans, self._spans = self._spans, {}
        return {
            f"timing_s/{phase}": sum(self._between(start, end) for start, end in spans[phase])
            for phase in PHASES
            if phase in spans
        }
