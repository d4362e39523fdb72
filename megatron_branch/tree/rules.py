"""What holds of all trees, as executable checks.

Always true:
- a check fails with the tree, the node and the rule in its message;
- nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.node import Node, Tree


def assert_always_true(trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> None:
    """Check every "Always true" of `node` and `build`.

    Args:
        trees: the result of `build_trees`.
        rollouts: what it was built from.

    Raises:
        AssertionError: a rule is broken.
    """
    held = [index for tree in trees for index in tree.rollouts]
    assert sorted(held) == list(range(len(rollouts))), "every rollout is in exactly one tree"
    assert [tree.index for tree in trees] == list(range(len(trees))), "a tree's index is its place"
    first = [tree.rollouts[0] for tree in trees]
    assert first == sorted(first), "trees stand in the order of their first rollout"
    for tree in trees:
        _check_order(tree)
        for node in tree.nodes[1:]:
            _check_child(tree, node)
        for node in tree.nodes:
            _check_tokens(tree, node, rollouts)
        _check_paths(tree, rollouts)
        tree_inputs = sum(node.multiplicity * node.inputs for node in tree.nodes)
        dense_inputs = sum(len(rollouts[index]) - 1 for index in tree.rollouts)
        assert tree_inputs == dense_inputs, (
            f"tree {tree.index}: {tree_inputs} inputs by multiplicity, {dense_inputs} dense"
        )


def _check_order(tree: Tree) -> None:
    """Depth-first order, the root first; links agree in both directions."""
    stack = [0]
    for place, node in enumerate(tree.nodes):
        where = f"tree {tree.index} node {place}"
        assert node.index == place, f"{where}: a node's index is its place"
        assert stack and stack.pop() == place, f"{where}: nodes stand in depth-first order"
        assert all(tree.nodes[child].parent == place for child in node.children), f"{where}: children know their parent"
        firsts = [tree.nodes[child].rollouts[0] for child in node.children]
        assert firsts == sorted(firsts), f"{where}: children stand in the order of their first rollout"
        stack.extend(reversed(node.children))
    assert not stack, f"tree {tree.index}: every child is a node"
    assert tree.nodes[0].parent == -1 and tree.nodes[0].start == 0, f"tree {tree.index}: the root begins at 0"
    assert tree.nodes[0].rollouts == tree.rollouts, f"tree {tree.index}: every rollout passes the root"


def _check_child(tree: Tree, node: Node) -> None:
    """Maximal nodes, and inputs that continue the parent's."""
    where = f"tree {tree.index} node {node.index}"
    parent = tree.nodes[node.parent]
    assert node.start == parent.end, f"{where}: own tokens continue the parent's"
    assert node.input_start == parent.input_end, f"{where}: inputs continue the parent's"
    assert set(node.rollouts) < set(parent.rollouts), f"{where}: a node is maximal, its parent passes more rollouts"


def _check_tokens(tree: Tree, node: Node, rollouts: Sequence[Rollout]) -> None:
    """The rollouts of a node agree on its tokens and provenance; siblings part at their first token."""
    where = f"tree {tree.index} node {node.index}"
    assert node.start < node.end, f"{where}: a node owns at least one token"
    assert list(node.rollouts) == sorted(set(node.rollouts)), f"{where}: rollouts ascend"
    passing = [rollouts[index] for index in node.rollouts]
    own = passing[0].token_ids[node.start : node.end]
    assert len(own) == node.end - node.start, f"{where}: its first rollout reaches its end"
    for other in passing[1:]:
        same = np.array_equal(own, other.token_ids[node.start : node.end])
        assert same and other.provenance == passing[0].provenance, f"{where}: {other.rollout_id} differs in it"
    heads = [int(rollouts[tree.nodes[child].rollouts[0]].token_ids[node.end]) for child in node.children]
    assert len(set(heads)) == len(heads), f"{where}: children begin with different tokens"


def _check_paths(tree: Tree, rollouts: Sequence[Rollout]) -> None:
    """The last node of each rollout's path ends where the rollout ends."""
    end = {index: node.end for node in tree.nodes for index in node.rollouts}
    for index in tree.rollouts:
        assert end[index] == len(rollouts[index]), f"tree {tree.index}: the path of rollout {index} ends where it ends"
