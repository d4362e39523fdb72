"""Synthetic rollouts have the promised shape, and the writer gives back what it was given."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts, write_rollouts
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.rules import assert_always_true
from megatron_branch.tree.stats import tree_stats

VOCABULARIES = [16, 97, 50_257]
FULL = SyntheticSpec(
    prefix_tokens=(9, 5),
    fan_out=(2, 3),
    tail_tokens=(6, 1, 0),
    groups=3,
    duplicates=2,
    strict_prefixes=2,
    train_shared=True,
    mask_holes=True,
    logprobs=True,
    advantages=True,
    interleave=True,
)


def assert_same(one: Rollout, other: Rollout, ignored: tuple[str, ...] = ("source",)) -> None:
    for name in (field.name for field in fields(Rollout) if field.name not in ignored):
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right, err_msg=name)
        else:
            assert left == right, name


def assert_record_rules(rollout: Rollout) -> None:
    """Every line of `record`'s "Always true"."""
    arrays = [rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.ref_logprobs, rollout.advantage]
    assert all(len(array) == len(rollout) and not array.flags.writeable for array in arrays if array is not None)
    assert not rollout.loss_mask[0]
    for values in (rollout.logprobs, rollout.ref_logprobs):
        if values is not None:
            assert np.isfinite(values[rollout.loss_mask]).all() and (values[rollout.loss_mask] <= 0).all()
            assert np.isnan(values[~rollout.loss_mask]).all()
    assert rollout.reward is not None or rollout.advantage is not None
    trained = np.flatnonzero(rollout.loss_mask)
    assert rollout.prompt_length == (trained[0] if len(trained) else len(rollout))


@pytest.mark.parametrize("name", ["f.jsonl", "f.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    rollouts = [*odd_rollouts(97, 0), *synthetic_rollouts(FULL)]
    odd = rollouts[3]
    extras = {"provenance": "adapter-7", "text": 'quote " and é', "metadata": {"a": [1]}, "reward": None}
    for field, value in (extras | {"advantage": np.where(odd.loss_mask, 0.1, 0.0), "finish": None}).items():
        object.__setattr__(odd, field, value)
    write_rollouts(tmp_path / name, rollouts)
    back = list(read_rollouts(tmp_path / name, vocab_size=97))
    assert len(back) == len(rollouts)
    for one, other in zip(rollouts, back, strict=True):
        assert_same(one, other)
        assert_record_rules(other)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text("old")
    with pytest.raises(AttributeError):
        write_rollouts(path, [odd_rollouts(97, 0)[0], None])
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_odd_rollouts_have_every_oddity(vocab_size: int) -> None:
    rollouts = odd_rollouts(vocab_size, seed=1)
    for rollout in rollouts:
        assert_record_rules(rollout)
        assert rollout.token_ids.max() < vocab_size
    trees = build_trees(rollouts)
    assert_always_true(trees, rollouts)
    stats = tree_stats(trees, rollouts)
    assert sum(map(len, rollouts)) <= 700 and stats.depth >= 3
    nodes = [(tree, node) for tree in trees for node in tree.nodes]
    leaves = {node.end - node.start for _, node in nodes if not node.children}
    assert min(leaves) == 1 and max(leaves) == 29 and len(leaves) >= 8, "unequal tails"
    texts = [tuple(rollout.token_ids.tolist()) for rollout in rollouts]
    twins = [index for index, text in enumerate(texts) if texts.count(text) > 1]
    assert len(twins) == 2, "an exact duplicate"
    one, other = (rollouts[index] for index in twins)
    assert (one.loss_mask != other.loss_mask).any() and one.reward != other.reward and other.advantage is not None
    both = one.loss_mask & other.loss_mask
    assert (one.logprobs[both] != other.logprobs[both]).all()
    inside = [node for _, node in nodes if node.children and any(len(rollouts[i]) == node.end for i in node.rollouts)]
    assert len(inside) >= 3, "strict prefixes and an empty response end at nodes with children"
    assert sum(rollout.trained_tokens == 0 for rollout in rollouts) >= 2, "empty responses"
    assert sum(not rollout.loss_mask[rollout.prompt_length :].all() for rollout in rollouts) >= 3, "mask holes"
    forks = [node for _, node in nodes if len(node.children) > 1]
    untrained = [f for f in forks if not any(rollouts[i].loss_mask[: f.end].any() for i in f.rollouts)]
    assert any(len({rollouts[i].group_id for i in fork.rollouts}) > 1 for fork in untrained), "across groups"
    inner = [i for fork in untrained for i in fork.rollouts if rollouts[i].prompt_length > fork.end]
    assert len({rollouts[i].group_id for i in inner} & {"forked"}) == 1, "a fork inside the prompt"
    groups = [rollout.group_id for rollout in rollouts]
    assert groups != sorted(groups, key=groups.index), "interleaved groups"
    alone = {tree.rollouts[0] for tree in trees if len(tree.rollouts) == 1}
    assert {groups.count(groups[index]) for index in alone} == {1, 2}, "a group of one, a group without sharing"
    assert any(tree.nodes[0].inputs == 0 and tree.nodes[0].children for tree in trees), "a one-token prompt"
    assert any(len(rollout) == 1 for rollout in rollouts), "a one-token rollout"
    shared = [
        n for _, n in nodes if n.children and any(rollouts[i].loss_mask[n.start : n.end].any() for i in n.rollouts)
    ]
    assert len(shared) >= 3, "trained tokens on shared nodes"
    given = [rollout.logprobs is not None for rollout in rollouts if rollout.trained_tokens]
    assert any(given) and not all(given)
    assert all(rollout.ref_logprobs is not None for rollout in rollouts)


def test_the_shape_of_odd_rollouts_depends_on_nothing() -> None:
    def shape(vocab_size: int, seed: int) -> list[object]:
        return [tree.nodes for tree in build_trees(odd_rollouts(vocab_size, seed))]

    # With 16 ids, a first token left to chance would meet a sibling's in one seed of 16.
    assert all(shape(16, seed) == shape(97, 0) for seed in range(60))
    assert shape(50_257, 0) == shape(97, 0)
    with pytest.raises(ValueError, match="vocab_size = 15: must be at least 16"):
        odd_rollouts(15, 0)


def test_rollouts_depend_on_the_seed_alone() -> None:
    def ids(seed: int) -> list[list[int]]:
        return [rollout.token_ids.tolist() for rollout in synthetic_rollouts(SyntheticSpec(seed=seed))]

    for one, other in zip(synthetic_rollouts(FULL), synthetic_rollouts(FULL), strict=True):
        assert_same(one, other, ignored=())
    assert ids(0) == ids(0) != ids(1)


def test_prefixes_fan_out_and_tails_are_as_asked() -> None:
    spec = SyntheticSpec(prefix_tokens=(9, 5), fan_out=(2, 3), tail_tokens=(6, 1), groups=3, vocab_size=7)
    rollouts = synthetic_rollouts(spec)
    trees = build_trees(rollouts)
    assert_always_true(trees, rollouts)
    assert len(trees) == 3 and len(rollouts) == 18
    for tree in trees:
        root, *others = tree.nodes
        middle = [node for node in others if node.children]
        assert (root.start, root.end, len(root.children)) == (0, 9, 2)
        assert [(node.start, node.end, len(node.children)) for node in middle] == [(9, 14, 3)] * 2
        assert [node.end - 14 for node in others if not node.children] == [6, 1, 6, 1, 6, 1]
    assert all(rollout.prompt_length == 14 and rollout.loss_mask[14:].all() for rollout in rollouts)
    assert all(rollout.logprobs is None and rollout.advantage is None for rollout in rollouts)


def test_options_do_what_they_say() -> None:
    rollouts = synthetic_rollouts(FULL)
    for rollout in rollouts:
        assert_record_rules(rollout)
    assert [rollout.group_id for rollout in rollouts[:4]] == ["g0", "g1", "g2", "g0"]
    group = [rollout for rollout in rollouts if rollout.group_id == "g0"]
    full, halves, copies = group[:6], group[6:8], group[8:]
    assert [len(rollout) for rollout in full] == [20, 15, 14, 20, 15, 14] and [len(h) for h in halves] == [17, 14]
    assert full[0].loss_mask.tolist() == [False] * 9 + [True] * 7 + [False] * 2 + [True] * 2
    assert copies[0].token_ids.tolist() == full[0].token_ids.tolist() and copies[0].loss_mask[9:].all()
    assert (copies[0].logprobs[9:16] != full[0].logprobs[9:16]).all()
    signs = {np.sign(rollout.advantage[rollout.loss_mask]).tolist()[0] for rollout in full if rollout.trained_tokens}
    assert signs == {-1.0, 1.0}
    uniform = -np.log(FULL.vocab_size)
    old = np.concatenate([rollout.logprobs[rollout.loss_mask] for rollout in rollouts])
    assert (old > uniform).any() and (old < uniform).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"fan_out": (2, 2)},
        {"tail_tokens": ()},
        {"prefix_tokens": (0,)},
        {"tail_tokens": (-1,)},
        {"vocab_size": 3},
        {"groups": 0},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SyntheticSpec(**changes)
