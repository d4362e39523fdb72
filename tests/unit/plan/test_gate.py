"""Which trees are shared, and what becomes of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_branch.plan.build import make_plan
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.plan import Plan
from megatron_branch.plan.rules import assert_always_true
from megatron_branch.plan.serial import digest, from_json, to_json
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree
from megatron_branch.tree.rules import assert_always_true as assert_trees
from tests.branching import CONFIGS, SHAPE, SIZES, prompt_with_tails, rollout, steps


def gated(rows: list[Rollout], config: BranchConfig | None = None) -> tuple[Plan, tuple[Tree, ...]]:
    """A checked plan of gated trees."""
    config = config or BranchConfig()
    trees = build_trees(rows, share=config.gradient != "dense")
    trees = gate_trees(trees, rows, config=config, layout=Layout(), shape=SHAPE, sizes=SIZES)
    assert_trees(trees, rows)
    layout = Layout()
    plan = make_plan(trees, rows, config=config, layout=layout, aggregation="token-mean", shape=SHAPE, sizes=SIZES)
    assert_always_true(plan, trees, rows)
    return plan, trees


@given(steps(), CONFIGS)
@settings(max_examples=100, deadline=None)
def test_any_gated_step_keeps_the_rules(rows: list[Rollout], config: BranchConfig) -> None:
    plan, trees = gated(rows, config)
    assert (plan.dense_trees == 0) or config.gradient == "exact"
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(
    ("prompt", "tails", "dense"),
    [(64, [512, 512], 1), (64, [2000, 2000], 1), (64, [16] * 8, 0), (2048, [128, 128], 0), (300, [64, 64], 0)],
)
def test_a_tree_is_shared_where_that_pays(prompt: int, tails: list[int], dense: int) -> None:
    config = BranchConfig(pack_tokens=256)
    plan, trees = gated(prompt_with_tails(prompt, tails), config)
    assert plan.dense_trees == dense
    assert len(trees) == (len(tails) if dense else 1)
    if dense:
        assert [unit.kind for unit in plan.ranks[0].units] == ["tail"] * len(tails)
        assert plan.executed_tokens == plan.logical_tokens


def test_only_exact_is_gated_and_only_where_asked() -> None:
    rows = prompt_with_tails(64, [512, 512])
    assert gated(rows, BranchConfig(pack_tokens=256))[0].dense_trees == 1
    for given_up in ({"gradient": "detached"}, {"gate": False}):
        config = BranchConfig.model_validate({"pack_tokens": 256, **given_up})
        assert gated(rows, config)[0].dense_trees == 0


def test_rollouts_longer_than_a_pass_stay_shared() -> None:
    rows = prompt_with_tails(64, [512, 512])
    assert gated(rows, BranchConfig(chunk_tokens=600, pack_tokens=256))[0].dense_trees == 1
    assert gated(rows, BranchConfig(chunk_tokens=500, pack_tokens=256))[0].dense_trees == 0


def test_each_tree_is_judged_alone_and_the_digest_knows() -> None:
    small = [
        rollout([7000 + i] + [3] * 40 + [100 * k + i] * 400, range(41, 441), f"s{i}{k}") for i in (0,) for k in (1, 2)
    ]
    rows = [*prompt_with_tails(1000, [20, 20, 20]), *small]
    plan, trees = gated(rows)
    assert plan.dense_trees == 1 and [tree.taken_from for tree in trees] == [None, 1, 1]
    off, _ = gated(rows, BranchConfig(gate=False))
    assert digest(plan, rows) != digest(off, rows)
    assert np.allclose(plan.row_weights, off.row_weights)


def test_a_rollout_alone_is_no_dense_tree() -> None:
    plan, _ = gated(prompt_with_tails(64, [30]))
    assert plan.dense_trees == 0 and [unit.kind for unit in plan.ranks[0].units] == ["tail"]


def test_packing_makes_sharing_pay_sooner() -> None:
    rows = odd_rollouts(97, 0)
    assert gated(rows)[0].dense_trees == 0
    assert gated(rows, BranchConfig(pack_tokens=1))[0].dense_trees == 2
