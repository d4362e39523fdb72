"""Advantages against hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_branch.objective.advantages import advantages
from megatron_branch.objective.config import AdvantageEstimator
from megatron_branch.rollouts.record import Rollout

ESTIMATORS: tuple[AdvantageEstimator, ...] = ("grpo", "grpo_no_std", "rloo")


def rollout(group: str, reward: float | None, *, length: int = 4, advantage: list[float] | None = None) -> Rollout:
    given = None if advantage is None else np.array(advantage)
    return Rollout(
        group_id=group,
        rollout_id="",
        token_ids=np.arange(length),
        loss_mask=np.arange(length) > 0,
        prompt_length=1,
        reward=reward,
        advantage=given,
    )


def scalars(rollouts: list[Rollout], estimator: AdvantageEstimator) -> list[float]:
    return [float(values[0]) for values in advantages(rollouts, estimator=estimator)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Rewards 0, 1, 5: mean 2, squared deviations 4 + 1 + 9 = 14, variance 7 with n - 1.
        ("grpo", [-2 / (7**0.5 + 1e-6), -1 / (7**0.5 + 1e-6), 3 / (7**0.5 + 1e-6)]),
        ("grpo_no_std", [-2.0, -1.0, 3.0]),
        ("rloo", [0 - 3.0, 1 - 2.5, 5 - 0.5]),
    ],
)
def test_estimators(estimator: AdvantageEstimator, expected: list[float]) -> None:
    group = [rollout("a", reward) for reward in (0.0, 1.0, 5.0)]
    np.testing.assert_allclose(scalars(group, estimator), expected, rtol=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_may_interleave(estimator: AdvantageEstimator) -> None:
    first, second = [rollout("a", r) for r in (0.0, 1.0, 5.0)], [rollout("b", r) for r in (3.0, -1.0)]
    mixed = scalars([first[0], second[0], first[1], second[1], first[2]], estimator)
    assert [mixed[0], mixed[2], mixed[4]] == scalars(first, estimator)
    assert [mixed[1], mixed[3]] == scalars(second, estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_of_one_and_equal_rewards_give_exactly_zero(estimator: AdvantageEstimator) -> None:
    """0.1 three times: a plain mean is one rounding off, which the standard-deviation floor would blow up."""
    rows = [rollout("one", 7.0), *(rollout("equal", 0.1) for _ in range(3))]
    assert scalars(rows, estimator) == [0.0] * 4


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_row_order_does_not_matter_to_the_last_bit(estimator: AdvantageEstimator) -> None:
    rewards = np.random.default_rng(3).normal(size=33) * 10.0 ** np.random.default_rng(4).integers(-3, 4, size=33)
    order = np.random.default_rng(5).permutation(33)
    straight = scalars([rollout("a", float(r)) for r in rewards], estimator)
    shuffled = scalars([rollout("a", float(r)) for r in rewards[order]], estimator)
    assert [straight[i] for i in order] == shuffled


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_given_advantage_overrides_and_its_reward_still_counts(estimator: AdvantageEstimator) -> None:
    plain = [rollout("a", 0.0), rollout("a", 1.0), rollout("a", 5.0)]
    given = [9.0, 8.0, 7.0, 6.0]
    values = advantages([plain[0], rollout("a", 1.0, advantage=given), plain[2]], estimator=estimator)
    assert values[1].tolist() == given
    expected = scalars(plain, estimator)
    assert [values[0][0], values[2][0]] == [expected[0], expected[2]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_row_without_reward_is_not_in_the_statistics(estimator: AdvantageEstimator) -> None:
    pair = [rollout("a", 0.0), rollout("a", 4.0)]
    with_third = scalars([*pair, rollout("a", None, advantage=[1.0] * 4)], estimator)
    assert with_third == [*scalars(pair, estimator), 1.0]


def test_one_value_per_token_without_memory() -> None:
    values = advantages([rollout("a", 0.0, length=6), rollout("a", 2.0, length=3)], estimator="grpo_no_std")
    assert [v.tolist() for v in values] == [[-1.0] * 6, [1.0] * 3]
    assert all(v.strides == (0,) and not v.flags.writeable for v in values)
