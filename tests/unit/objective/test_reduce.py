"""Metrics of a step from its sums and its rollouts (tests/distributed/test_reduce.py joins ranks)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_branch.objective.losses import LossSums
from megatron_branch.objective.reduce import actor_metrics, rollout_metrics
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tracking.metrics import check_keys


def rollout(group: str, reward: float | None, *, prompt: int = 3, response: int = 2) -> Rollout:
    length = prompt + response
    return Rollout(
        group_id=group,
        rollout_id="",
        token_ids=np.arange(length),
        loss_mask=np.arange(length) >= prompt,
        prompt_length=prompt,
        reward=reward,
        advantage=np.zeros(length) if reward is None else None,
    )


def test_actor_metrics_divide_by_entries_once() -> None:
    scalars = {"loss": 9.0, "pg_loss": -0.5, "kl_loss": 8.0, "entropy": 6.0, "clipped": 1.0, "old_minus_new": -2.0}
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    sums = LossSums(**values, entries=torch.tensor(4.0), max_log_ratio=torch.tensor(7.0))
    metrics = actor_metrics(sums)
    assert metrics == {
        "actor/pg_loss": -0.5,
        "actor/entropy": 1.5,
        "actor/ppo_kl": -0.5,
        "actor/pg_clipfrac": 0.25,
    }
    check_keys(metrics)


def test_rollout_metrics() -> None:
    rows = [
        rollout("a", 1.0, prompt=3, response=2),
        rollout("a", 1.0, prompt=3, response=0),
        rollout("b", 0.0, prompt=5, response=7),
        rollout("b", 4.0, prompt=5, response=1),
        rollout("c", None, prompt=1, response=5),
        rollout("d", -1.0, prompt=1, response=3),
    ]
    metrics = rollout_metrics(rows)
    assert metrics == pytest.approx(
        {
            "reward/mean": 1.0,
            "reward/std": (14 / 4) ** 0.5,  # deviations 0, 0, -1, 3, -2 over n - 1 = 4
            "reward/min": -1.0,
            "reward/max": 4.0,
            "reward/frac_zero_std": 2 / 3,  # a and d; c has no reward
            "response_length/mean": 3.0,
            "prompt_length/mean": 3.0,
        },
        rel=1e-14,
    )
    check_keys(metrics)


def test_without_rewards_there_are_no_reward_keys() -> None:
    assert set(rollout_metrics([rollout("a", None)])) == {"response_length/mean", "prompt_length/mean"}


def test_one_reward_has_no_spread() -> None:
    metrics = rollout_metrics([rollout("a", 2.0)])
    assert (metrics["reward/std"], metrics["reward/frac_zero_std"]) == (0.0, 1.0)
