"""The plan of a whole step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_branch.plan.cost import training_flops
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Aggregation
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.branching import CONFIGS, SHAPE, planned, prompt_with_tails, rollout, steps

AGGREGATIONS = st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])


@given(steps(), CONFIGS, st.integers(1, 4), AGGREGATIONS)
@settings(max_examples=200, deadline=None)
def test_any_step_makes_a_plan_that_keeps_the_rules(
    rows: list[Rollout], config: BranchConfig, dp: int, aggregation: Aggregation
) -> None:
    planned(rows, config=config, dp=dp, aggregation=aggregation)


def test_the_odd_step_keeps_the_rules_in_every_mode() -> None:
    rows = odd_rollouts(vocab_size=97, seed=3)
    for gradient in ("exact", "detached", "dense"):
        for chunk_tokens in (7, 16, None):
            config = BranchConfig.model_validate({"gradient": gradient, "chunk_tokens": chunk_tokens})
            planned(rows, config=config, dp=2)


def test_counts_of_a_prompt_with_tails() -> None:
    plan, _ = planned(prompt_with_tails(10, [3, 2, 4]))
    assert (plan.rows, plan.trained_tokens, plan.loss_tokens) == (3, 9, 9)
    assert plan.logical_tokens == 3 * 9 + 9
    assert plan.executed_tokens == 9 + 9


def test_a_target_that_several_rollouts_train_counts_once_in_the_head() -> None:
    plan, _ = planned([rollout([0, 1, 2, 3], [1, 3]), rollout([0, 1, 2, 4], [1, 2, 3])])
    assert (plan.trained_tokens, plan.loss_tokens) == (5, 4)


def test_trees_go_to_ranks_by_cost_largest_first() -> None:
    rows = [rollout([first] * length, [length - 1]) for first, length in enumerate((9, 4, 8, 5, 7))]
    plan, _ = planned(rows, dp=2)
    assert [rank.trees for rank in plan.ranks] == [(0, 1, 3), (2, 4)]
    loads = [sum(training_flops(unit, SHAPE) for unit in rank.units) for rank in plan.ranks]
    assert max(loads) / min(loads) < 1.5
    assert [unit.tree for unit in plan.ranks[0].units] == [0, 1, 3]


def test_equal_trees_fall_to_the_lower_rank_first() -> None:
    plan, _ = planned([rollout([first, 7], [1]) for first in range(5)], dp=3)
    assert [rank.trees for rank in plan.ranks] == [(0, 3), (1, 4), (2,)]


def test_a_rank_may_have_nothing_and_untrained_trees_go_nowhere() -> None:
    plan, _ = planned([rollout([5, 5, 5], []), *prompt_with_tails(3, [2, 1])], dp=3)
    assert [rank.trees for rank in plan.ranks] == [(1,), (), ()]
    assert plan.ranks[1].units == ()


def test_units_of_the_second_tree_refer_to_their_own_tree() -> None:
    second = [rollout([9, 8, 7, tail], [3]) for tail in (1, 2)]
    plan, _ = planned([*prompt_with_tails(3, [2, 1]), *second])
    assert [(unit.index, unit.tree, unit.context) for unit in plan.ranks[0].units] == [
        (0, 0, ()),
        (1, 0, (0,)),
        (2, 1, ()),
        (3, 1, (2,)),
    ]
