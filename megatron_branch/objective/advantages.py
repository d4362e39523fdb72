"""Advantages of a step's rollouts, from the rewards of their groups. Torch-free; runs before anything is sharded.

The statistics of a group do not depend on the order of its rows, to the last bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_branch.objective.config import AdvantageEstimator
from megatron_branch.rollouts.record import Reals, Rollout

# Added to the standard deviation of a group before dividing by it (verl's value).
_STD_FLOOR = 1e-6


def advantages(rollouts: Sequence[Rollout], *, estimator: AdvantageEstimator) -> list[Reals]:
    """Advantage of every token of every rollout, in the order of `rollouts`.

    An advantage that the file gives overrides the estimator. The statistics of a group are over all its rows that have
    a reward, those with a given advantage included. With r the reward and n such rows:

    - `grpo`: (r - mean) / (std + 1e-6), the standard deviation with n - 1 (DeepSeekMath);
    - `grpo_no_std`: r - mean (Dr. GRPO);
    - `rloo`: r - mean of the other n - 1 rewards (Ahmadian et al.).

    A group of one gets 0.

    Args:
        rollouts: whole groups: a group that is split over two calls gets two baselines.
        estimator: one of the above.

    Returns:
        One read-only float64 array `[L]` per rollout, aligned with its `token_ids`; an estimated advantage is one
        number repeated without memory (stride 0).
    """
    members: dict[str, list[int]] = defaultdict(list)
    for row, rollout in enumerate(rollouts):
        if rollout.reward is not None:
            members[rollout.group_id].append(row)
    estimated: dict[int, float] = {}
    for rows in members.values():
        rewards = np.array([rollouts[row].reward for row in rows], dtype=np.float64)
        estimated.update(zip(rows, _estimate(rewards, estimator).tolist(), strict=True))

    result: list[Reals] = []
    for row, rollout in enumerate(rollouts):
        if rollout.advantage is not None:
            result.append(rollout.advantage)
        else:
            assert row in estimated, f"{rollout.source}: a rollout has a reward or an advantage"
            result.append(np.broadcast_to(np.float64(estimated[row]), len(rollout)))
    return result


def _estimate(rewards_N: Reals, estimator: AdvantageEstimator) -> Reals:
    """Advantages of one group's rewards `[N]`."""
    count = len(rewards_N)
    if count == 1:
        return np.zeros(1)
    # Relative to the lowest, equal rewards give exactly 0, not a rounding error divided by _STD_FLOOR. fsum is exact,
    # so the order of the rows does not matter.
    raised_N = rewards_N - rewards_N.min()
    centred_N: Reals = raised_N - math.fsum(raised_N) / count
    if estimator == "grpo":
        return centred_N / (math.sqrt(math.fsum(centred_N**2) / (count - 1)) + _STD_FLOOR)
    if estimator == "rloo":
        return centred_N * (count / (count - 1))  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    assert estimator == "grpo_no_std", estimator
    return centred_N
