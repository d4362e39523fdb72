"""Trees against a dictionary of all prefixes, and the time they take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree import build
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Node, Tree
from megatron_branch.tree.rules import assert_always_true

Rows = list[tuple[list[int], str]]
ROWS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.sampled_from(["", "a"])), max_size=14)


def rollout(ids: Sequence[int] | np.ndarray, provenance: str = "") -> Rollout:
    array = np.asarray(ids, dtype=np.int64)
    mask = np.zeros(len(array), dtype=bool)
    return Rollout("g", "r", array, mask, len(array), reward=0.0, provenance=provenance)


def shape(trees: Sequence[Tree]) -> set[tuple[int, int, tuple[int, ...]]]:
    """The nodes as sets of rollouts over positions; with the rules of `rules` this determines the trees."""
    return {(node.start, node.end, node.rollouts) for tree in trees for node in tree.nodes}


def oracle(rows: Rows) -> set[tuple[int, int, tuple[int, ...]]]:
    """The same from the definition: a node is a maximal run of prefixes with one set of rollouts."""
    passing: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, (ids, provenance) in enumerate(rows):
        for length in range(1, len(ids) + 1):
            passing[provenance, tuple(ids[:length])].append(index)
    nodes = set()
    for ids, provenance in rows:
        sets = [(length, tuple(passing[provenance, tuple(ids[:length])])) for length in range(1, len(ids) + 1)]
        for held, run in groupby(sets, key=lambda entry: entry[1]):
            lengths = [length for length, _ in run]
            nodes.add((lengths[0] - 1, lengths[-1], held))
    return nodes


@settings(deadline=None)
@given(rows=ROWS)
def test_nodes_are_the_maximal_runs_of_shared_prefixes(rows: Rows) -> None:
    rollouts = [rollout(*row) for row in rows]
    trees = build_trees(rollouts)
    assert_always_true(trees, rollouts)
    assert shape(trees) == oracle(rows)


@settings(deadline=None)
@given(rows=ROWS, data=st.data())
def test_another_order_relabels_and_no_more(rows: Rows, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    rollouts = [rollout(*row) for row in rows]
    permuted = [rollouts[index] for index in order]
    trees = build_trees(permuted)
    assert_always_true(trees, permuted)
    relabelled = {(start, end, tuple(sorted(order[i] for i in held))) for start, end, held in shape(trees)}
    assert relabelled == shape(build_trees(rollouts))


@settings(deadline=None)
@given(rows=ROWS)
def test_without_sharing_every_rollout_is_a_tree_of_one_node(rows: Rows) -> None:
    rollouts = [rollout(*row) for row in rows]
    trees = build_trees(rollouts, share=False)
    assert_always_true(trees, rollouts)
    assert [tree.nodes for tree in trees] == [(Node(0, -1, 0, len(r), (i,), ()),) for i, r in enumerate(rollouts)]


def test_labels_and_order_of_a_nested_tree() -> None:
    rollouts = [rollout(ids) for ids in ([7, 1], [1, 2, 3, 4], [1, 2, 5], [7, 0], [1, 2, 3, 6, 6], [1], [1, 2, 5])]
    first, second = build_trees(rollouts)
    assert first.nodes == (
        Node(0, -1, 0, 1, (0, 3), (1, 2)),
        Node(1, 0, 1, 2, (0,), ()),
        Node(2, 0, 1, 2, (3,), ()),
    )
    assert second.rollouts == (1, 2, 4, 5, 6)
    assert second.nodes == (
        Node(0, -1, 0, 1, (1, 2, 4, 5, 6), (1,)),
        Node(1, 0, 1, 2, (1, 2, 4, 6), (2, 5)),
        Node(2, 1, 2, 3, (1, 4), (3, 4)),
        Node(3, 2, 3, 4, (1,), ()),
        Node(4, 2, 3, 5, (4,), ()),
        Node(5, 1, 2, 3, (2, 6), ()),
    )


def test_provenance_keeps_equal_ids_apart() -> None:
    trees = build_trees([rollout([1, 2], "image-a"), rollout([1, 2], "image-b"), rollout([1, 2], "image-a")])
    assert [tree.rollouts for tree in trees] == [(0, 2), (1,)]


def test_ids_decide_whatever_their_integer_type() -> None:
    narrow = rollout([1, 2, 3])
    object.__setattr__(narrow, "token_ids", narrow.token_ids.astype(np.int32))
    assert len(build_trees([rollout([1, 2, 3]), narrow])[0].nodes) == 1


def test_nothing_and_a_rollout_without_tokens() -> None:
    assert build_trees([]) == ()
    with pytest.raises(ValueError, match="r: token_ids is empty"):
        build_trees([rollout([])])


@pytest.mark.parametrize("fork", [1, 2, 3, 4, 5, 8, 9])
def test_a_fork_is_found_across_the_blocks_of_a_comparison(monkeypatch: pytest.MonkeyPatch, fork: int) -> None:
    monkeypatch.setattr(build, "_COMPARE_TOKENS", 4)
    left, right = [0] * 10, [0] * 10
    right[fork] = 1
    assert build_trees([rollout(left), rollout(right)])[0].nodes[0].end == fork


def seconds(rollouts: list[Rollout]) -> float:
    """Processor time, so that other work on the machine does not count."""
    start = time.process_time()
    build_trees(rollouts)
    return time.process_time() - start


def test_a_long_shared_prefix_is_fast() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 50_000, 131_072)
    rollouts = [rollout(np.concatenate([prefix, rng.integers(0, 50_000, 1_024)])) for _ in range(64)]
    # 8.5 million comparisons take 10 ms with vector instructions, 400 ms one by one in Python.
    assert min(seconds(rollouts) for _ in range(3)) < 0.2
    assert build_trees(rollouts)[0].nodes[0].end == 131_072


@pytest.mark.parametrize("vocab_size", [2, 50_000])
def test_many_rollouts_do_not_cost_their_square(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    rollouts = [rollout(ids) for ids in rng.integers(0, vocab_size, (4_096, 64))]
    for one in rollouts:
        one.token_ids[0] = 0
    # Measured 0.15 s; comparing each with each takes 8 million visits of at least 0.5 us.
    assert min(seconds(rollouts) for _ in range(3)) < 1.5


def test_a_chain_deeper_than_the_recursion_limit() -> None:
    rollouts = [rollout(np.zeros(length)) for length in range(1_500, 0, -1)]
    (tree,) = build_trees(rollouts)
    assert [node.multiplicity for node in tree.nodes] == list(range(1_500, 0, -1))
