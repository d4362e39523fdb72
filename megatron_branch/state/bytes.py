"""Counting the bytes of the state by kind."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("state", "adjoint", "stage_input")


@dataclass
class ByteCount:
    """Bytes held now and at the peak of their sum, by kind: `state` (K/V), `adjoint`, `stage_input`."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    peak_total: int = 0

    def add(self, kind: str, size: int) -> None:
        """Count `size` more bytes (fewer when negative)."""
        self.now[kind] += size
        self.peak[kind] = max(self.peak[kind], self.now[kind])
        self.peak_total = max(self.peak_total, sum(self.now.values()))

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.peak = dict(self.now)
        self.peak_total = sum(self.now.values())
