"""Counting the bytes of the state by kind and by place."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_branch.state.placement import PLACES, Place

KINDS = ("state", "adjoint", "stage_input", "moving", "activations")


@dataclass
class ByteCount:
    """Bytes held now and at their peaks.

    Attributes:
        now, peak: by kind: `state` (K/V), `adjoint`, `stage_input`, each where the placement keeps it, and `moving`:
            copies on their way between places, and stage inputs gathered for a replay; `activations`: graphs that are
            retained for replays.
        now_at, peak_at: by place: `device`, `host`, `nvme`.
        peak_total: peak of the sum of everything.
    """

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    now_at: dict[Place, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    peak_at: dict[Place, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    peak_total: int = 0
    _total: int = 0

    def add(self, kind: str, size: int, place: Place = "device") -> None:
        """Count `size` more bytes (fewer when negative)."""
        self.now[kind] += size
        self.now_at[place] += size
        self._total += size
        if size > 0:
            self.peak[kind] = max(self.peak[kind], self.now[kind])
            self.peak_at[place] = max(self.peak_at[place], self.now_at[place])
            self.peak_total = max(self.peak_total, self._total)

    def reset_peak(self) -> None:
        """Forget the peaks."""
        self.peak, self.peak_at = dict(self.now), dict(self.now_at)
        self.peak_total = self._total
