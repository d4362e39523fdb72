"""Wall time of a step by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_branch.tracking.metrics import PHASES


class Timers:
    """Seconds by phase since the last `take`: `with timers("capture"): ...`.

    Phases may nest (`step` holds all others); a phase does not nest in itself.
    """

    def __init__(
        self, sync: Callable[[], object] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sync` waits for the device, so that its work counts in the phase that started it; None: no device."""
        self._sync = sync
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block's time under `phase`, also when it raises."""
        assert phase in PHASES, f"phase {phase!r} is not declared: {', '.join(PHASES)}"
        assert phase not in self._open, f"phase {phase!r} is already being timed"
        self._open.add(phase)
        start = self._now()
        try:
            yield
        finally:
            self._open.discard(phase)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """Seconds by metric key (`timing_s/PHASE`) of the phases that ran; starts again from zero."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": seconds[phase] for phase in PHASES if phase in seconds}

    def _now(self) -> float:
        if self._sync is not None:
            self._sync()
        return self._clock()
