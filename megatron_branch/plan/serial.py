"""The plan as text, and the digest that ranks compare before their first collective.

Always true:
- `from_json(to_json(plan)) == plan`;
- two ranks have one digest only if they hold the same plan over the same tokens and masks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_branch.plan.plan import Plan, RankPlan, Segment, Unit
from megatron_branch.rollouts.record import Rollout


def to_json(plan: Plan) -> str:
    """Canonical JSON: sorted keys, no spaces, floats that read back exactly."""
    return json.dumps(asdict(plan), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote."""
    fields = json.loads(text)
    ranks = tuple(
        RankPlan(trees=tuple(rank["trees"]), units=tuple(_unit(unit) for unit in rank["units"]))
        for rank in fields.pop("ranks")
    )
    return Plan(ranks=ranks, row_weights=tuple(fields.pop("row_weights")), **fields)


def _unit(fields: dict[str, Any]) -> Unit:
    segments = tuple(Segment(**segment) for segment in fields.pop("segments"))
    return Unit(segments=segments, context=tuple(fields.pop("context")), **fields)


def digest(plan: Plan, rollouts: Sequence[Rollout]) -> str:
    """SHA-256 (hex) of the plan and of every rollout's token ids and loss mask."""
    total = hashlib.sha256(to_json(plan).encode())
    for rollout in rollouts:
        total.update(len(rollout).to_bytes(8, "little"))
        total.update(np.ascontiguousarray(rollout.token_ids, dtype="<i8").data)
        total.update(np.ascontiguousarray(rollout.loss_mask, dtype=np.uint8).data)
    return total.hexdigest()
