"""One optimizer step as this rank computes it: its units' tensors, cut from the rollouts when a pass needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_branch.attention.descriptor import HeadRows
from megatron_branch.objective.losses import LossTable
from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.plan.shard import Shard, shard_unit
from megatron_branch.plan.tables import LossRows, loss_rows, unit_inputs
from megatron_branch.rollouts.record import Ids, Reals, Rollout
from megatron_branch.schedule.runner import UnitTensors
from megatron_branch.tree.node import Tree


@dataclass(frozen=True)
class Entries:
    """Which (rollout, token) each entry of this rank's loss table stands for, and its row; int64 `[E]` each."""

    row: Ids
    rollout: Ids
    token: Ids


@dataclass(eq=False)
class StepBatch:
    """The units of one data-parallel rank and the tensors of each, for one context-parallel rank.

    Attributes:
        plan: the whole step.
        trees, rollouts: what the plan was made of.
        advantages: per rollout, `[L]`.
        dp_rank: whose units.
        cp: number of context-parallel ranks; `cp_rank` is this one.
        ulysses: size of the Ulysses groups among them.
        sequence_parallel: tensor-parallel ranks that share the tokens between layers; 1: each has all of them.
        device: where the tensors are made.
        old_logprobs: `file`: the rows' own values, the current log-prob where a row has none; `current`: always the
            current one.
        head_always: units without loss have a head without rows, so that every backward pass makes the same
            collectives.
        scored: per unit, old log-probs `[E]` from a scoring pass; they take precedence.
    """

    plan: Plan
    trees: Sequence[Tree]
    rollouts: Sequence[Rollout]
    advantages: Sequence[Reals]
    dp_rank: int
    cp: int
    cp_rank: int
    device: torch.device
    ulysses: int = 1
    sequence_parallel: int = 1
    old_logprobs: str = "file"
    head_always: bool = False
    scored: dict[int, Tensor] = field(default_factory=dict)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of this data-parallel rank."""
        return self.plan.ranks[self.dp_rank].units

    def shard(self, unit: Unit) -> Shard:
        """This rank's share of a unit."""
        return self._shards(tuple(s.tokens for s in unit.segments))[0]

    def tensors(self, unit: int) -> UnitTensors:
        """See `runner.StepSource`."""
        planned = self.units[unit]
        shard, attended = self._shards(tuple(s.tokens for s in planned.segments))
        ids, positions = unit_inputs(planned, self.trees, self.rollouts)
        padding = shard.padded - shard.tokens
        ids = np.pad(ids, (0, padding))[shard.pack_index]
        positions = np.pad(positions, (0, padding), mode="edge")[shard.pack_index]
        head, table = None, None
        if planned.trained or self.head_always:
            rows = loss_rows(planned, self.trees, self.rollouts)
            kept, local = _held(rows, shard)
            head = HeadRows(self._tensor(local), self._tensor(rows.targets[kept]))
            table = self._table(unit, self._entries(rows, kept))
        return UnitTensors(
            self._tensor(ids)[None], self._tensor(positions), shard, attended, self._rows(shard), head, table
        )

    def entries(self, unit: int) -> Entries:
        """The entries of a unit's loss table on this rank; empty for a unit without loss."""
        planned = self.units[unit]
        rows = loss_rows(planned, self.trees, self.rollouts)
        return self._entries(rows, _held(rows, self.shard(planned))[0])

    def idle(self) -> UnitTensors:
        """See `runner.StepSource`."""
        shard, attended = self._shards((1,))
        zeros = torch.zeros(shard.local, dtype=torch.int64, device=self.device)
        none = np.zeros(0, dtype=np.int64)
        table = self._table(-1, Entries(none, none, none))
        none_held = HeadRows(zeros[:0], zeros[:0])
        return UnitTensors(zeros[None], zeros, shard, attended, self._rows(shard), none_held, table)

    def _shards(self, segments: tuple[int, ...]) -> tuple[Shard, Shard]:
        """This rank's share of a unit, and what it attends to: its Ulysses group's share."""
        split = partial(shard_unit, segments, cp=self.cp, rank=self.cp_rank, align=self.sequence_parallel)
        shard = split()
        return shard, shard if self.ulysses == 1 else split(ulysses=self.ulysses)

    def _rows(self, shard: Shard) -> int:
        return shard.local // self.sequence_parallel

    def _entries(self, rows: LossRows, kept: np.ndarray) -> Entries:
        mine = kept[rows.entry_row]
        number = np.cumsum(kept) - 1
        return Entries(number[rows.entry_row[mine]], rows.entry_rollout[mine], rows.entry_token[mine])

    def _table(self, unit: int, entries: Entries) -> LossTable:
        weights = np.asarray(self.plan.row_weights)[entries.rollout]
        rollouts = self.rollouts
        old = self.scored.get(unit)
        if old is None:
            from_file = self.old_logprobs == "file"
            old = self._reals(_pick(lambda row: rollouts[row].logprobs if from_file else None, entries))
        reference = None
        if all(rollouts[row].ref_logprobs is not None for row in np.unique(entries.rollout)):
            reference = self._reals(_pick(lambda row: rollouts[row].ref_logprobs, entries))
        return LossTable(
            entry_row=self._tensor(entries.row),
            weight_E=self._reals(weights),
            advantage_E=self._reals(_pick(lambda row: self.advantages[row], entries)),
            old_logp_E=old,
            ref_logp_E=reference,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _reals(self, array: np.ndarray) -> Tensor:
        return self._tensor(array.astype(np.float64))


def _held(rows: LossRows, shard: Shard) -> tuple[np.ndarray, Ids]:
    """Which rows this rank holds, and the local offsets of those."""
    local = np.full(shard.padded, -1, dtype=np.int64)
    local[shard.pack_index] = np.arange(shard.local)
    offsets = local[rows.rows]
    kept = offsets >= 0
    return kept, offsets[kept]


def _pick(values_of: Callable[[int], Reals | None], entries: Entries) -> Reals:
    """One value per entry; NaN for a rollout that has none."""
    picked = np.full(entries.rollout.shape[0], np.nan)
    order = np.argsort(entries.rollout, kind="stable")
    rollouts, starts = np.unique(entries.rollout[order], return_index=True)
    ends = [*starts[1:], len(order)][: len(starts)]  # none without entries
    for rollout, start, end in zip(rollouts.tolist(), starts, ends, strict=True):
        values = values_of(rollout)
        if values is not None:
            mine = order[start:end]
            picked[mine] = values[entries.token[mine]]
    return picked
