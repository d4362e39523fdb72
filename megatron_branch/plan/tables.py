"""Index tables of one unit: what it is fed, which positions carry loss, and for which rollouts.

Pack coordinates: the segments of a unit concatenated in order, padding excluded. A segment [start, end) that begins at
pack offset b has its input at position start + i at offset b + i, and the target of that input is token start + i + 1.

Always true:
- `rows` ascend, and each has at least one entry;
- `entry_row` points into `rows`, and the entry's token is the target of that row in that rollout;
- over the units of a plan every (rollout, trained token) occurs in exactly one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Flags, Ids, Rollout
from megatron_branch.tree.node import Tree


@dataclass(frozen=True, slots=True, eq=False)
class LossRows:
    """Where the head runs in one unit, and whose losses it feeds.

    Attributes:
        rows: `[n]` pack offsets of the inputs whose target some rollout trains.
        targets: `[n]` token ids of those targets.
        entry_row: `[E]` index into `rows`; one entry per (row, rollout that trains it).
        entry_rollout: `[E]` index of the rollout in the step.
        entry_token: `[E]` position of the token inside that rollout.
    """

    rows: Ids
    targets: Ids
    entry_row: Ids
    entry_rollout: Ids
    entry_token: Ids


def trained_by_any(rollouts: Sequence[Rollout], indices: Iterable[int], start: int, end: int) -> Flags:
    """True where one of the rollouts trains the token, for the token positions start .. end - 1."""
    union = np.zeros(end - start, dtype=np.bool_)
    for index in indices:
        union |= rollouts[index].loss_mask[start:end]
    return union


def loss_rows(unit: Unit, trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> LossRows:
    """Tables of the unit's trained positions, int64, in pack coordinates."""
    rows: list[Ids] = []
    targets: list[Ids] = []
    entry_row: list[Ids] = []
    entry_rollout: list[Ids] = []
    entry_token: list[Ids] = []
    offset = 0
    filled = 0
    for segment in unit.segments:
        members = trees[unit.tree].nodes[segment.node].rollouts
        first, last = segment.start + 1, segment.end + 1
        union = trained_by_any(rollouts, members, first, last)
        row_of = np.cumsum(union, dtype=np.int64) + (filled - 1)
        local = np.flatnonzero(union)
        rows.append(local + offset)
        targets.append(rollouts[members[0]].token_ids[first:last][local])
        for member in members:
            own = np.flatnonzero(rollouts[member].loss_mask[first:last])
            entry_row.append(row_of[own])
            entry_rollout.append(np.full(own.shape[0], member, dtype=np.int64))
            entry_token.append(own + first)
        offset += segment.tokens
        filled += local.shape[0]
    return LossRows(
        rows=np.concatenate(rows),
        targets=np.concatenate(targets),
        entry_row=np.concatenate(entry_row),
        entry_rollout=np.concatenate(entry_rollout),
        entry_token=np.concatenate(entry_token),
    )


def unit_inputs(unit: Unit, trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> tuple[Ids, Ids]:
    """Token ids `[T]` and absolute positions `[T]` of a unit's inputs, int64, in pack coordinates."""
    nodes = trees[unit.tree].nodes
    ids = [rollouts[nodes[s.node].rollouts[0]].token_ids[s.start : s.end] for s in unit.segments]
    positions = [np.arange(s.start, s.end, dtype=np.int64) for s in unit.segments]
    return np.concatenate(ids), np.concatenate(positions)
