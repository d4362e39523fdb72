"""Cuts of nodes and packs of tails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.pack import near_equal, tree_units
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.build import build_trees
from tests.branching import CONFIGS, drawn, planned, prompt_with_tails, rollout, steps


def units_of(rows: list[Rollout], **config: object) -> list[str]:
    plan, _ = planned(rows, config=BranchConfig.model_validate(config))
    return drawn(plan.ranks[0].units)


def test_chunks_are_few_and_near_equal() -> None:
    assert near_equal(3, 13, 4) == [(3, 6), (6, 9), (9, 13)]
    assert near_equal(0, 8, 4) == [(0, 4), (4, 8)]
    assert near_equal(0, 8, None) == [(0, 8)]
    assert near_equal(5, 5, 4) == []


def test_a_prompt_with_tails() -> None:
    rows = prompt_with_tails(10, [3, 2, 4])
    assert units_of(rows) == ["C0.0[0:9]", "T0.0[9:12,9:11,9:13]"]
    assert units_of(rows, chunk_tokens=5) == ["C0.0[0:4]", "C0.1[4:9]", "T0.0[9:12,9:11]", "T0.1[9:13]"]
    assert units_of(rows, pack_tokens=3) == ["C0.0[0:9]", "T0.0[9:12]", "T0.1[9:11]", "T0.2[9:13]"]


def test_a_long_tail_is_captured_like_a_prefix() -> None:
    rows = prompt_with_tails(4, [2, 9, 1])
    assert units_of(rows, chunk_tokens=4) == ["C0.0[0:3]", "T0.0[3:5,3:4]", "C2.0[3:6]", "C2.1[6:9]", "T2.0[9:12]"]


def test_a_rollout_alone_is_one_tail() -> None:
    assert units_of([rollout(range(6), [3, 5])]) == ["T0.0[0:5]"]
    assert units_of([rollout(range(6), [3, 5])], chunk_tokens=2) == ["C0.0[0:1]", "C0.1[1:3]", "T0.0[3:5]"]


def test_a_one_token_prompt_has_no_unit_of_its_own() -> None:
    assert units_of([rollout([7, 1, 2], [1, 2]), rollout([7, 3], [1])]) == ["T0.0[0:2,0:1]"]


def test_nested_prefixes_come_depth_first_after_the_tails_of_their_parent() -> None:
    rows = [
        rollout([0, 1, 2, 3, 4, 5], [4, 5]),
        rollout([0, 1, 2, 3, 6], [4]),
        rollout([0, 1, 7], [2]),
        rollout([0, 1, 8, 9, 9], [4]),
        rollout([0, 1, 8, 9, 3, 3], [4, 5]),
    ]
    assert units_of(rows) == [
        "C0.0[0:1]",
        "T0.0[1:2]",
        "C1.0[1:3]",
        "T1.0[3:5,3:4]",
        "C5.0[1:3]",
        "T5.0[3:4,3:5]",
    ]


def test_what_no_trained_token_needs_is_not_computed() -> None:
    masked = rollout([0, 1, 2, 5, 5], [], "masked tail")
    ends_early = rollout([0, 1, 2, 3, 3, 3], [3], "untrained end")
    empty = rollout([0, 1, 2], [], "empty response")
    assert units_of([masked, ends_early, empty, rollout([0, 1, 2, 4], [3])]) == ["C0.0[0:2]", "T0.0[2:3,2:3]"]


def test_a_node_whose_children_are_dropped_is_a_leaf() -> None:
    rows = [rollout([0, 1, 2, 3, 4], [2, 3]), rollout([0, 1, 2, 3, 5], [2]), rollout([0, 1, 6], [2])]
    assert units_of(rows) == ["C0.0[0:1]", "T0.0[1:3,1:2]"]


def test_dense_takes_every_trained_rollout_whole() -> None:
    rows = [*prompt_with_tails(5, [2, 3]), rollout(range(5), []), rollout([0, 1, 2, 9], [2])]
    assert units_of(rows, gradient="dense", chunk_tokens=2, pack_tokens=1) == ["T0.0[0:6]", "T0.0[0:7]", "T0.0[0:3]"]


def test_detached_captures_the_prompt_and_replays_nothing() -> None:
    rows = prompt_with_tails(10, [3, 2])
    assert units_of(rows, gradient="detached", chunk_tokens=5) == ["c0.0[0:4]", "c0.1[4:9]", "T0.0[9:12,9:11]"]


def test_detached_cuts_a_leaf_where_its_loss_begins() -> None:
    assert units_of([rollout(range(8), [5, 7])], gradient="detached") == ["c0.0[0:4]", "T0.0[4:7]"]
    assert units_of([rollout(range(8), [1])], gradient="detached") == ["T0.0[0:1]"]


def test_detached_with_a_fork_inside_the_prompt() -> None:
    """The prompt ends at 6 in both branches; what follows the fork up to there is constant, in each branch apart."""
    rows = [
        rollout([0, 1, 2, 3, 4, 5, 6, 7], [6, 7]),
        rollout([0, 1, 2, 3, 4, 5, 8], [6]),
        rollout([0, 1, 2, 9, 9, 9, 9, 9], [6, 7]),
    ]
    assert units_of(rows, gradient="detached") == [
        "c0.0[0:2]",
        "c1.0[2:5]",
        "T1.0[5:7,5:6]",
        "c4.0[2:5]",
        "T4.0[5:7]",
    ]


def test_detached_follows_the_union_of_the_rollouts_of_a_node() -> None:
    """Row 0 trains token 2 on the shared node, so row 1, which does not, reads replayed state from position 1 on."""
    rows = [rollout([0, 1, 2, 3, 4], [2, 4]), rollout([0, 1, 2, 3, 5, 6], [5])]
    assert units_of(rows, gradient="detached") == ["c0.0[0:1]", "C0.1[1:3]", "T0.0[3:4,3:5]"]


def test_duplicates_share_everything() -> None:
    rows = [rollout([0, 1, 2, 3], [3]), rollout([0, 1, 2, 3], [2])]
    assert units_of(rows) == ["T0.0[0:3]"]
    assert units_of(rows, gradient="detached") == ["c0.0[0:1]", "T0.0[1:3]"]


@given(steps(), CONFIGS)
@settings(max_examples=150, deadline=None)
def test_limits_hold_for_any_step(rows: list[Rollout], config: BranchConfig) -> None:
    plan, _ = planned(rows, config=config)
    for unit in plan.ranks[0].units:
        if config.gradient == "dense":
            continue
        assert unit.tokens <= (config.chunk_tokens or 10**9)
        assert len(unit.segments) == 1 or unit.tokens <= config.pack_limit


def test_dense_refuses_a_shared_tree() -> None:
    rows = prompt_with_tails(3, [1, 1])
    (tree,) = build_trees(rows)
    with pytest.raises(AssertionError, match="without sharing"):
        tree_units(tree, rows, BranchConfig(gradient="dense"))
