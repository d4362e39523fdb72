"""Groups of a file, and which of them each optimizer step takes.

Always true:
- groups stand in the order of their first row, rows within a group in file order, also where groups interleave;
- a group is whole: no step holds a part of one, and no rollout of one is dropped alone for its length;
- the steps of an epoch hold every group once, and depend on nothing but the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_branch.rollouts.config import DataConfig
from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt, at least one, in file order."""

    group_id: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RolloutGroups:
    """What a file holds.

    Attributes:
        groups: in the order of their first row.
        skipped_rows: bad rows that were left out (`on_bad_row: skip`).
        dropped_groups: groups left out for a rollout longer than `max_tokens`.
        dropped_rows: the rows of those groups.
    """

    groups: tuple[Group, ...]
    skipped_rows: int
    dropped_groups: int
    dropped_rows: int


def read_groups(config: DataConfig, *, vocab_size: int | None = None) -> RolloutGroups:
    """Read the whole file.

    Args:
        config: the file, what to do with bad rows, and `max_tokens`.
        vocab_size: number of token ids that the model knows, None to leave it unchecked.

    Raises:
        ValueError: see `read_rollouts`; or `max_tokens` leaves no group.
    """
    reader = read_rollouts(config.rollouts, on_bad_row=config.on_bad_row, vocab_size=vocab_size)
    rows: dict[str, list[Rollout]] = {}
    overlong: dict[str, int] = {}
    for rollout in reader:
        members = rows.setdefault(rollout.group_id, [])
        if config.max_tokens is not None and len(rollout) > config.max_tokens:
            overlong.setdefault(rollout.group_id, 0)
        if rollout.group_id in overlong:
            # Counted, not kept: the rows of a group that will be dropped take no memory.
            overlong[rollout.group_id] += len(members) + 1
            members.clear()
        else:
            members.append(rollout)
    groups = tuple(Group(name, tuple(members)) for name, members in rows.items() if name not in overlong)
    if not groups:
        rule = f"data.max_tokens = {config.max_tokens}: every group has a longer rollout"
        raise ValueError(f"{config.rollouts}: {rule}; raise it or set it to null")
    return RolloutGroups(groups, reader.skipped, len(overlong), sum(overlong.values()))


def plan_steps(groups: Sequence[Group], config: DataConfig, epoch: int) -> list[list[Rollout]]:
    """The rollouts of each optimizer step of an epoch.

    Args:
        groups: of the file, in file order.
        config: groups per step, shuffling and its seed.
        epoch: from 0; with shuffling, each has its own order.

    Returns:
        One list per step: `groups_per_step` groups, fewer in the last step, group after group.
    """
    order = np.arange(len(groups))
    if config.shuffle:
        np.random.default_rng([config.seed, epoch]).shuffle(order)
    size = config.groups_per_step
    return [
        [rollout for place in order[at : at + size] for rollout in groups[place].rollouts]
        for at in range(0, len(order), size)
    ]
