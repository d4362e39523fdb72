"""Merge the rollouts of a step into trees.

A compressed trie, filled rollout by rollout. Every token is compared once, with vector instructions, against the first
rollout that passes the node; the rest of the work is one visit per rollout and node, which is the size of the result.
Groups play no part: sharing is decided by token ids and provenance alone.

Always true:
- every rollout is in one tree, and the nodes that hold it are the root-to-node path that spells its tokens;
- two rollouts share a node as far as their token ids and provenance agree from position 0, and no further;
- trees, and the children of a node, stand in the order of their first rollout;
- another order of the rollouts gives the same trees with other labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_branch.rollouts.record import Ids, Rollout
from megatron_branch.tree.node import Node, Tree

_COMPARE_TOKENS = 1 << 15


@dataclass(slots=True)
class _Branch:
    """A node while the trie grows; children by their first token."""

    start: int
    end: int
    rollouts: list[int]
    children: dict[int, _Branch] = field(default_factory=dict)


def _common(left: Ids, right: Ids) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    for at in range(0, length, _COMPARE_TOKENS):
        stop = min(at + _COMPARE_TOKENS, length)
        differs = left[at:stop] != right[at:stop]
        if differs.any():
            return at + int(differs.argmax())
    return length


def _split(branch: _Branch, position: int, ids: Ids) -> None:
    """End the branch at position; what it held beyond becomes its only child."""
    lower = _Branch(position, branch.end, list(branch.rollouts), branch.children)
    branch.end = position
    branch.children = {int(ids[position]): lower}


def _insert(root: _Branch, index: int, rollouts: Sequence[Rollout]) -> None:
    """Add one rollout to the trie that begins with its first token."""
    ids = rollouts[index].token_ids
    branch = root
    while True:
        first = rollouts[branch.rollouts[0]].token_ids
        position = branch.start + _common(first[branch.start : branch.end], ids[branch.start :])
        if position < branch.end:
            _split(branch, position, first)
        branch.rollouts.append(index)
        if position == len(ids):
            return
        token = int(ids[position])
        if token not in branch.children:
            branch.children[token] = _Branch(position, len(ids), [index])
            return
        branch = branch.children[token]


def _preorder(root: _Branch) -> list[tuple[_Branch, int]]:
    """The branches in depth-first order, each with the place of its parent (-1 for the root)."""
    order: list[tuple[_Branch, int]] = []
    stack = [(root, -1)]
    while stack:
        branch, parent = stack.pop()
        stack.extend((child, len(order)) for child in reversed(branch.children.values()))
        order.append((branch, parent))
    return order


def _freeze(root: _Branch, index: int) -> Tree:
    order = _preorder(root)
    children: list[list[int]] = [[] for _ in order]
    for place, (_, parent) in enumerate(order):
        if parent >= 0:
            children[parent].append(place)
    nodes = tuple(
        Node(place, parent, branch.start, branch.end, tuple(branch.rollouts), tuple(children[place]))
        for place, (branch, parent) in enumerate(order)
    )
    return Tree(index, nodes, nodes[0].rollouts)


def build_trees(rollouts: Sequence[Rollout], *, share: bool = True) -> tuple[Tree, ...]:
    """Merge rollouts on exact shared token prefixes, at any depth and across groups.

    Args:
        rollouts: the rollouts of one step; nodes refer to them by index.
        share: False leaves every rollout alone in a tree of one node, which is dense training.

    Returns:
        The trees, in the order of their first rollout.

    Raises:
        ValueError: a rollout has no tokens.
    """
    roots: dict[tuple[object, ...], _Branch] = {}
    for index, rollout in enumerate(rollouts):
        if not len(rollout):
            raise ValueError(
                f"{rollout.source or rollout.rollout_id}: token_ids is empty; a rollout has at least 1 token"
            )
        key = (rollout.provenance, int(rollout.token_ids[0])) if share else (index,)
        if key in roots:
            _insert(roots[key], index, rollouts)
        else:
            roots[key] = _Branch(0, len(rollout), [index])
    return tuple(_freeze(root, index) for index, root in enumerate(roots.values()))
