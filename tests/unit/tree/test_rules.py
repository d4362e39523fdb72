"""Each rule notices the fault it is there for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_branch.rollouts.synthetic import odd_rollouts
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Node, Tree
from megatron_branch.tree.rules import assert_always_true

ROLLOUTS = odd_rollouts(97, 0)
TREES = build_trees(ROLLOUTS)


def with_node(tree: Tree, place: int, **changes: object) -> tuple[Tree, ...]:
    nodes = list(tree.nodes)
    nodes[place] = replace(nodes[place], **changes)
    return (replace(tree, nodes=tuple(nodes)), *TREES[1:])


def split_in_two(node: Node) -> tuple[Tree, ...]:
    """A node that is not maximal: one tree of a single node, cut at position 3."""
    upper = replace(node, end=3, children=(1,))
    lower = replace(node, index=1, parent=0, start=3)
    return (*TREES[:1], replace(TREES[1], nodes=(upper, lower)), *TREES[2:])


DEEP = TREES[0]
FAULTS = {
    "rollout lost": (TREES[1:], "every rollout is in exactly one tree"),
    "tree index": ((replace(DEEP, index=5), *TREES[1:]), "a tree's index is its place"),
    "tree order": (tuple(replace(t, index=i) for i, t in enumerate(reversed(TREES))), "order of their first rollout"),
    "node index": (with_node(DEEP, 4, index=9), "a node's index is its place"),
    "parent": (with_node(DEEP, 4, parent=2), "children know their parent"),
    "child order": (with_node(DEEP, 0, children=tuple(reversed(DEEP.nodes[0].children))), "order of their first"),
    "child lost": (with_node(DEEP, 0, children=DEEP.nodes[0].children[:-1]), "depth-first order"),
    "start": (with_node(DEEP, 4, start=DEEP.nodes[4].start + 1), "continue the parent's"),
    "root end": (with_node(DEEP, 0, end=6), "continue the parent's"),
    "leaf end": (with_node(DEEP, 4, end=DEEP.nodes[4].end - 1), "ends where it ends"),
    "empty node": (with_node(DEEP, 5, end=DEEP.nodes[5].start), "at least one token"),
    "rollouts unsorted": (with_node(DEEP, 6, rollouts=DEEP.nodes[6].rollouts[::-1]), "rollouts ascend"),
    "stranger": (with_node(DEEP, 5, rollouts=(1,)), "passes more rollouts"),
    "not maximal": (split_in_two(TREES[1].nodes[0]), "a node is maximal"),
}


def test_the_trees_themselves_pass() -> None:
    assert_always_true(TREES, ROLLOUTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    trees, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        assert_always_true(trees, ROLLOUTS)


def test_a_different_token_or_provenance_is_noticed() -> None:
    index = DEEP.nodes[4].rollouts[1]
    changed = ROLLOUTS[index].token_ids.copy()
    changed[-1] = (changed[-1] + 1) % 97
    for other in (replace(ROLLOUTS[index], token_ids=changed), replace(ROLLOUTS[index], provenance="x")):
        rollouts = [other if place == index else rollout for place, rollout in enumerate(ROLLOUTS)]
        with pytest.raises(AssertionError, match="differs in it"):
            assert_always_true(TREES, rollouts)


def test_siblings_with_one_head_are_noticed() -> None:
    left, right = (node for node in DEEP.nodes if node.index in DEEP.nodes[8].children)
    changed = ROLLOUTS[right.rollouts[0]].token_ids.copy()
    changed[right.start] = ROLLOUTS[left.rollouts[0]].token_ids[left.start]
    rollouts = list(ROLLOUTS)
    rollouts[right.rollouts[0]] = replace(ROLLOUTS[right.rollouts[0]], token_ids=np.asarray(changed))
    with pytest.raises(AssertionError, match="begin with different tokens"):
        assert_always_true(TREES, rollouts)
