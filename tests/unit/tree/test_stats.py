"""Statistics, counted by hand and against a count of distinct prefixes."""

from __future__ import annotations

from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.stats import TreeStats, tree_stats


def test_a_tree_counted_by_hand() -> None:
    spec = SyntheticSpec(prefix_tokens=(10, 4), fan_out=(2, 2), tail_tokens=(3, 5), groups=2)
    rollouts = synthetic_rollouts(spec)
    # Per tree: root 9 inputs, two nodes of 4, tails of 3 + 5 + 3 + 5; dense: 2 rollouts of 17 tokens and 2 of 19.
    assert tree_stats(build_trees(rollouts), rollouts) == TreeStats(
        rollouts=8,
        groups=2,
        trees=2,
        nodes=14,
        depth=3,
        logical_tokens=2 * (2 * 16 + 2 * 18),
        tree_tokens=2 * (9 + 8 + 16),
        shared_tokens=2 * (9 + 8),
        trained_tokens=2 * 16,
        tails_per_tree=4.0,
        prompt_mean=14.0,
        response_mean=4.0,
        longest=19,
    )


def test_inputs_are_the_distinct_prefixes_that_have_a_next_token() -> None:
    rollouts = odd_rollouts(97, 0)
    stats = tree_stats(build_trees(rollouts), rollouts)
    # A node owns its targets, so its inputs count the distinct prefixes of at least 2 tokens.
    readers: dict[bytes, int] = {}
    for rollout in rollouts:
        for length in range(2, len(rollout) + 1):
            key = rollout.token_ids[:length].tobytes()
            readers[key] = readers.get(key, 0) + 1
    assert stats.tree_tokens == len(readers) and stats.logical_tokens == sum(readers.values())
    assert stats.shared_tokens == sum(count > 1 for count in readers.values())
    assert stats.token_ratio == len(readers) / sum(readers.values())
    assert stats.depth == 5 and stats.trees == 5 and stats.groups == 5


def test_without_sharing_the_ratio_is_one() -> None:
    rollouts = odd_rollouts(97, 0)
    stats = tree_stats(build_trees(rollouts, share=False), rollouts)
    assert stats.token_ratio == 1.0 and stats.shared_tokens == 0 and stats.depth == 1 and stats.tails_per_tree == 1.0
    one_token = [rollout for rollout in rollouts if len(rollout) == 1]
    assert tree_stats(build_trees(one_token), one_token).token_ratio == 1.0


def test_text_shows_the_numbers() -> None:
    rollouts = synthetic_rollouts(SyntheticSpec(prefix_tokens=(101,), fan_out=(8,), tail_tokens=(25,)))
    text = tree_stats(build_trees(rollouts), rollouts).text()
    assert "8 rollouts of 1 groups in 1 trees: 9 nodes, depth 2, 8.0 tails per tree" in text
    assert "dense 1,000, in trees 300 (30.0 %, x3.33), shared 100; trained tokens 200" in text
    assert "prompt 101.0, response 25.0 on average, longest rollout 126" in text
