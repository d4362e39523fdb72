"""Where each kind of state lives, and what that costs in bytes. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host", "nvme"]
PLACES: tuple[Place, ...] = ("device", "host", "nvme")
BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of each kind."""

    state: Place = "device"
    adjoint: Place = "device"
    stage_input: Place = "device"

    @staticmethod
    def everything(place: Place) -> Placement:
        """All kinds at one place."""
        return Placement(place, place, place)

    @property
    def places(self) -> dict[str, Place]:
        """By kind."""
        return {"state": self.state, "adjoint": self.adjoint, "stage_input": self.stage_input}

    def __str__(self) -> str:
        return ", ".join(f"{kind} {place}" for kind, place in self.places.items())


def stored_bytes(sizes: Iterable[int], place: Place) -> int:
    """What tensors of these sizes take at a place; in a file each fills whole blocks of 4096 bytes."""
    return sum(sizes) if place != "nvme" else sum(-(-size // BLOCK) * BLOCK for size in sizes)


def own_rows(rows: int, size: int, rank: int) -> tuple[int, int]:
    """The rows `[start, end)` that one of `size` ranks keeps of what all of them hold; `size` may exceed `rows`."""
    block = -(-rows // size)
    return min(rank * block, rows), min((rank + 1) * block, rows)
