"""What must hold for every plan, checked from the rollouts and not from the code that planned.

Always true:
- a check here fails on a broken plan with the unit's label and the rank in its message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_branch.plan.plan import Plan, RankPlan, Unit
from megatron_branch.plan.tables import trained_by_any
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.node import Node, Tree

NEVER = 2**62
"""A position after every token."""
ROUNDING = 4 * 2.0**-52
"""Two divisions, one product and one comparison in float64."""


def assert_always_true(plan: Plan, trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> None:
    """Check every "Always true" line of `plan.py`.

    Raises:
        AssertionError: naming the rank, the unit and what is wrong with it.
    """
    for number, rank in enumerate(plan.ranks):
        for index, unit in enumerate(rank.units):
            where = f"rank {number}, tree {unit.tree}, {unit.kind} {unit.label}"
            assert unit.index == index, f"{where}: index {unit.index} at place {index}"
            _assert_segments(unit, trees[unit.tree], where)
            _assert_context(unit, rank, trees[unit.tree], where)
            _assert_gradient(unit, plan, trees[unit.tree], rollouts, where)
        _assert_depth_first(rank, number)
    _assert_cover(plan, trees, rollouts)
    _assert_counts(plan, trees, rollouts)
    _assert_weights(plan, rollouts)


def _path(node: Node, tree: Tree) -> list[Node]:
    """The node and its ancestors, root first."""
    path = [node]
    while path[0].parent >= 0:
        path.insert(0, tree.nodes[path[0].parent])
    return path


def _assert_segments(unit: Unit, tree: Tree, where: str) -> None:
    assert unit.segments, f"{where}: has no segment"
    for segment in unit.segments:
        node = tree.nodes[segment.node]
        inside = node.input_start <= segment.start < segment.end <= node.input_end
        assert inside, f"{where}: {segment} is outside its node's inputs {node.input_start}..{node.input_end}"
    if len(unit.segments) > 1:
        nodes = [tree.nodes[segment.node] for segment in unit.segments]
        assert unit.kind == "tail", f"{where}: a prefix has one segment"
        assert len({node.parent for node in nodes}) == 1, f"{where}: packs nodes of several parents"
        assert len({node.index for node in nodes}) == len(nodes), f"{where}: packs a node twice"
        starts = [segment.start == node.input_start for segment, node in zip(unit.segments, nodes, strict=True)]
        assert all(starts), f"{where}: a packed segment does not start where its parent ends"


def _assert_context(unit: Unit, rank: RankPlan, tree: Tree, where: str) -> None:
    ancestors = {node.index for node in _path(tree.nodes[unit.segments[0].node], tree)}
    covered = 0
    for place in unit.context:
        assert 0 <= place < unit.index, f"{where}: reads unit {place}, which is not earlier"
        read = rank.units[place]
        assert read.kind == "prefix" and read.tree == unit.tree, f"{where}: reads {read.kind} of tree {read.tree}"
        segment = read.segments[0]
        assert segment.node in ancestors, f"{where}: reads node {segment.node}, which is not on its path"
        assert segment.start == covered, f"{where}: its context jumps from position {covered} to {segment.start}"
        covered = segment.end
    for segment in unit.segments:
        assert segment.start == covered, f"{where}: starts at {segment.start}, but its context ends at {covered}"


def _assert_depth_first(rank: RankPlan, number: int) -> None:
    order = [unit.tree for unit in rank.units]
    runs = [tree for place, tree in enumerate(order) if place == 0 or order[place - 1] != tree]
    assert tuple(runs) == rank.trees, f"rank {number}: units run through trees {runs}, not {rank.trees}"
    names = {(unit.tree, unit.kind, unit.label) for unit in rank.units}
    assert len(names) == len(rank.units), f"rank {number}: two units have one label"
    path: list[int] = []
    for unit in rank.units:
        known = [place for place in path if place in unit.context]
        assert known == list(unit.context), f"rank {number}: {unit.label} reads a unit whose subtree is left"
        path = known + ([unit.index] if unit.kind == "prefix" else [])


def _assert_gradient(unit: Unit, plan: Plan, tree: Tree, rollouts: Sequence[Rollout], where: str) -> None:
    union = [trained_by_any(rollouts, tree.nodes[s.node].rollouts, s.start + 1, s.end + 1) for s in unit.segments]
    assert unit.trained == any(bool(mask.any()) for mask in union), f"{where}: trained={unit.trained}"
    if plan.gradient == "dense":
        assert unit.kind == "tail" and not unit.context, f"{where}: dense has no prefix"
    replayed = unit.kind == "prefix"
    if plan.gradient == "detached":
        for segment in unit.segments:
            first = NEVER
            for node in _path(tree.nodes[segment.node], tree):
                mask = trained_by_any(rollouts, node.rollouts, node.input_start + 1, node.end)
                first = min(first, int(np.argmax(mask)) + node.input_start + 1 if mask.any() else NEVER)
            constant = segment.end < first
            assert constant or segment.start + 1 >= first, f"{where}: {segment} mixes constant and replayed positions"
            assert not (constant and unit.kind == "tail"), f"{where}: a tail without loss"
            replayed = replayed and not constant
    assert unit.replayed == replayed, f"{where}: replayed={unit.replayed} in {plan.gradient} mode"
    retained = {"recompute": False, "retain": replayed, "auto": unit.retained and replayed}[plan.activations]
    assert unit.retained == retained, f"{where}: retained_bytes={unit.retained_bytes} under {plan.activations}"


def _assert_cover(plan: Plan, trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> None:
    """Each live input is computed once, no other input is computed."""
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in plan.ranks:
        for unit in rank.units:
            for segment in unit.segments:
                pieces.setdefault((unit.tree, segment.node), []).append((segment.start, segment.end))
    for tree in trees:
        for node in tree.nodes:
            last = max(int(np.flatnonzero(rollouts[r].loss_mask)[-1:].sum()) for r in node.rollouts)
            end = min(node.input_end, last)
            if plan.gradient == "dense":
                end = node.input_end if last else node.input_start
            covered = node.input_start
            for start, stop in sorted(pieces.pop((tree.index, node.index), [])):
                assert start == covered, f"tree {tree.index}, node {node.index}: computed to {covered}, then {start}"
                covered = stop
            expected = max(end, node.input_start)
            assert covered == expected, f"tree {tree.index}, node {node.index}: computed to {covered}, not {expected}"
    assert not pieces, f"segments of unknown nodes {sorted(pieces)}"
    placed = [tree for rank in plan.ranks for tree in rank.trees]
    assert len(set(placed)) == len(placed), "a tree is on two ranks"


def _assert_counts(plan: Plan, trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> None:
    distinct = 0
    for tree in trees:
        for node in tree.nodes:
            distinct += int(trained_by_any(rollouts, node.rollouts, node.input_start + 1, node.end).sum())
    executed = sum(unit.tokens for rank in plan.ranks for unit in rank.units)
    expected = {
        "rows": len(rollouts),
        "trained_tokens": sum(int(rollout.loss_mask[1:].sum()) for rollout in rollouts),
        "logical_tokens": sum(len(rollout) - 1 for rollout in rollouts),
        "executed_tokens": executed,
        "loss_tokens": distinct,
    }
    for name, value in expected.items():
        assert getattr(plan, name) == value, f"{name} is {getattr(plan, name)}, not {value}"
    assert plan.executed_tokens <= plan.logical_tokens, "more inputs than dense training"


def _assert_weights(plan: Plan, rollouts: Sequence[Rollout]) -> None:
    """The means weigh 1 in total, token sums weigh 1 when each row counts once; equal within a row's class."""
    trained = np.array([rollout.loss_mask.sum() for rollout in rollouts], dtype=np.float64)
    weights = np.array(plan.row_weights)
    assert weights.shape == trained.shape, f"{weights.shape[0]} weights for {trained.shape[0]} rows"
    assert not weights[trained == 0].any(), "a row without a trained token has weight"
    weights, trained = weights[trained > 0], trained[trained > 0]
    # What must be equal over the rows, and the number of times that it is counted.
    equal, times = {
        "token-mean": (weights, trained),
        "seq-mean-token-sum": (weights, np.ones_like(trained)),
        "seq-mean-token-mean": (weights * trained, np.ones_like(trained)),
    }[plan.aggregation]
    assert np.allclose(equal, 1.0 / times.sum(), rtol=ROUNDING, atol=0), f"weights {weights} under {plan.aggregation}"
