"""Cuts the nodes of one tree into passes and packs sibling tails.

An input is *live* when some rollout that passes through it trains a later token; only live inputs are computed. What
is dropped are the ends of branches after their last trained token, so a node keeps all its inputs while one of its
children is live, and a node without a live child is planned as a leaf.

Always true:
- units are depth first: a node's chunks, then the packs of its leaves, then its other children;
- no pass has more than `chunk_tokens` inputs, no pass of several tails more than `pack_limit` (dense: no limits);
- the sizes of a node's chunks differ by at most one (detached: among its constant and its other chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Segment, Unit, UnitKind
from megatron_branch.plan.tables import trained_by_any
from megatron_branch.rollouts.record import Ids, Rollout
from megatron_branch.tree.node import Node, Tree


@dataclass(frozen=True, slots=True)
class TreeUnits:
    """Units of one tree; `index` and `context` count from the tree's first unit.

    Attributes:
        units: in depth-first order.
        loss_rows: per unit, positions at which the head runs.
    """

    units: tuple[Unit, ...]
    loss_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A slice of a node's inputs; `constant` when nothing up to its last target is trained (detached mode)."""

    segment: Segment
    constant: bool


def near_equal(start: int, end: int, limit: int | None) -> list[tuple[int, int]]:
    """Split [start, end) into the fewest slices of at most `limit`, of sizes that differ by at most one."""
    if start >= end:
        return []
    pieces = 1 if limit is None else -(-(end - start) // limit)
    bounds = [start + (end - start) * piece // pieces for piece in range(pieces + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


class _Packer:
    """Walks one tree and collects its units."""

    def __init__(self, tree: Tree, rollouts: Sequence[Rollout], config: BranchConfig) -> None:
        self.tree = tree
        self.config = config
        self.targets: list[Ids] = [self._node_targets(node, rollouts) for node in tree.nodes]
        self.live = [len(targets) > 0 for targets in self.targets]
        for node in reversed(tree.nodes):
            if node.parent >= 0 and self.live[node.index]:
                self.live[node.parent] = True
        self.units: list[Unit] = []
        self.loss_rows: list[int] = []

    @staticmethod
    def _node_targets(node: Node, rollouts: Sequence[Rollout]) -> Ids:
        """Positions of the node's trained targets, ascending."""
        first = node.input_start + 1
        return np.flatnonzero(trained_by_any(rollouts, node.rollouts, first, node.end)) + first

    def run(self) -> TreeUnits:
        pending: list[tuple[int, tuple[int, ...], bool]] = [(0, (), False)] if self.live[0] else []
        while pending:
            index, context, carries_loss = pending.pop()
            children = [child for child in self.tree.nodes[index].children if self.live[child]]
            cuts = self._cuts(index, carries_loss)
            for chunk, cut in enumerate(cuts if children else cuts[:-1]):
                replayed = not cut.constant
                label = f"{index}.{chunk}"
                context += (self._add("prefix", label, (cut.segment,), context=context, replayed=replayed),)
            if not children:
                self._add("tail", f"{index}.0", (cuts[-1].segment,), context=context)
                continue
            carries_loss = carries_loss or len(self.targets[index]) > 0
            packable = {child: self._fits_a_pack(child, carries_loss) for child in children}
            self._add_packs(index, [child for child in children if packable[child]], context)
            rest = [child for child in children if not packable[child]]
            pending.extend((child, context, carries_loss) for child in reversed(rest))
        return TreeUnits(units=tuple(self.units), loss_rows=tuple(self.loss_rows))

    def _live_end(self, index: int) -> int:
        """Position after the node's last live input."""
        node = self.tree.nodes[index]
        if any(self.live[child] for child in node.children):
            return node.input_end
        return int(self.targets[index][-1])

    def _cuts(self, index: int, carries_loss: bool) -> list[_Cut]:
        """Slices of the node's live inputs; `carries_loss` when a target before the node on its path is trained."""
        start, end = self.tree.nodes[index].input_start, self._live_end(index)
        turn = start
        if self.config.gradient == "detached" and not carries_loss:
            targets = self.targets[index]
            turn = max(start, int(targets[0]) - 1) if len(targets) else end
        limit = self.config.chunk_tokens
        constant = [_Cut(Segment(index, *piece), True) for piece in near_equal(start, turn, limit)]
        return constant + [_Cut(Segment(index, *piece), False) for piece in near_equal(turn, end, limit)]

    def _fits_a_pack(self, index: int, carries_loss: bool) -> bool:
        """A leaf in one piece, which therefore starts where its parent ends."""
        if any(self.live[child] for child in self.tree.nodes[index].children):
            return False
        return len(self._cuts(index, carries_loss)) == 1

    def _add_packs(self, parent: int, leaves: Sequence[int], context: tuple[int, ...]) -> None:
        packs: list[list[Segment]] = []
        room = 0
        for leaf in leaves:
            segment = Segment(leaf, self.tree.nodes[leaf].input_start, self._live_end(leaf))
            if not packs or segment.tokens > room:
                packs.append([])
                room = self.config.pack_limit
            packs[-1].append(segment)
            room -= segment.tokens
        for number, segments in enumerate(packs):
            self._add("tail", f"{parent}.{number}", tuple(segments), context=context)

    def _add(
        self,
        kind: UnitKind,
        label: str,
        segments: tuple[Segment, ...],
        *,
        context: tuple[int, ...],
        replayed: bool = False,
    ) -> int:
        """Append a unit and return its index."""
        index = len(self.units)
        rows = sum(self._rows(segment) for segment in segments)
        self.units.append(
            Unit(
                index=index,
                tree=self.tree.index,
                label=label,
                kind=kind,
                segments=segments,
                context=context,
                trained=rows > 0,
                replayed=replayed,
            )
        )
        self.loss_rows.append(rows)
        return index

    def _rows(self, segment: Segment) -> int:
        first, last = np.searchsorted(self.targets[segment.node], (segment.start + 1, segment.end + 1))
        return int(last - first)


def tree_units(tree: Tree, rollouts: Sequence[Rollout], config: BranchConfig) -> TreeUnits:
    """Cut and pack one tree.

    Args:
        tree: the tree.
        rollouts: all rollouts of the step.
        config: gradient mode and limits.

    Returns:
        Its units; none when no rollout of the tree trains a token.
    """
    if config.gradient == "dense":
        return _dense_units(tree, rollouts)
    return _Packer(tree, rollouts, config).run()


def _dense_units(tree: Tree, rollouts: Sequence[Rollout]) -> TreeUnits:
    """The whole rollout as one tail, as ordinary training computes it."""
    assert len(tree.nodes) == 1 and len(tree.rollouts) == 1, "dense plans need trees built without sharing"
    (node,) = tree.nodes
    rows = rollouts[tree.rollouts[0]].trained_tokens
    if rows == 0:
        return TreeUnits(units=(), loss_rows=())
    unit = Unit(
        index=0,
        tree=tree.index,
        label="0.0",
        kind="tail",
        segments=(Segment(0, node.input_start, node.input_end),),
        context=(),
        trained=True,
        replayed=False,
    )
    return TreeUnits(units=(unit,), loss_rows=(rows,))
