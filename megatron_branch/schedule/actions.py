"""One slot of the schedule.

Always true:
- a prefix unit has one `capture` slot and, if it is replayed, one `replay` slot on every stage;
- a tail has one slot of phase `both` on the last stage, and a `forward` and a `backward` slot on every other;
- `idle` computes a pass without tokens of its own so that collectives stay matched; its unit is -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["capture", "tail", "replay", "idle"]
Phase = Literal["forward", "backward", "both"]
LETTER: dict[str, str] = {"capture": "C", "tail": "T", "replay": "R", "idle": "I"}


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does in one slot.

    Attributes:
        kind: capture, tail, replay or idle.
        unit: index into the rank's units, -1 for idle.
        phase: `forward` for a capture; for a replay `both` (recompute, then backward), or `backward` where the unit is
            retained; see the module for tails. An idle stands for a capture (`forward`) or for a tail or replay
            (`both`).
    """

    kind: Kind
    unit: int
    phase: Phase

    def text(self, label: str) -> str:
        """`C0.0`, `T0.1`, `R0.0`; `T0.1>` and `T0.1<` for the two halves of a tail; `I>` and `I` for idle."""
        mark = {"capture": "", "replay": ""}.get(self.kind, {"forward": ">", "backward": "<", "both": ""}[self.phase])
        return f"{LETTER[self.kind]}{label if self.unit >= 0 else ''}{mark}"
