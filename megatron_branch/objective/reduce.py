"""From sums over entries to the metrics of a step (the keys are those of tracking/metrics.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_branch.objective.losses import ADDED_FIELDS, LossSums
from megatron_branch.rollouts.record import Rollout


def reduce_losses(sums: LossSums, groups: Sequence[dist.ProcessGroup]) -> LossSums:
    """Join the sums of the ranks (collective: every rank of every group calls it once per step).

    Args:
        sums: over the passes of this rank; `LossSums.zero` on a pipeline stage without the head.
        groups: the axes over which entries differ, one after the other: data and context parallel; and pipeline
            parallel, so that every stage gets the result. Never tensor parallel: its ranks hold the same entries.

    Returns:
        The sums of the step, the same on every rank.
    """
    added = torch.stack([getattr(sums, name) for name in ADDED_FIELDS])
    largest = sums.max_log_ratio.clone()
    for group in groups:
        dist.all_reduce(added, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return LossSums(**dict(zip(ADDED_FIELDS, added.unbind(), strict=True)), max_log_ratio=largest)


def actor_metrics(sums: LossSums) -> dict[str, float]:
    """The `actor/` metrics of the objective, from the sums of the whole step: `pg_loss` with the step's weights, the
    others as means over all entries (trained tokens of all rollouts)."""
    names = ("pg_loss", "entropy", "old_minus_new", "clipped", "entries")
    pg_loss, entropy, old_minus_new, clipped, entries = torch.stack([getattr(sums, name) for name in names]).tolist()
    assert entries > 0, "a step has at least one trained token"
    return {
        "actor/pg_loss": pg_loss,
        "actor/entropy": entropy / entries,
        "actor/ppo_kl": old_minus_new / entries,
        "actor/pg_clipfrac": clipped / entries,
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards and lengths of a step's rollouts (all ranks' together, >= 1).

    `reward/std` is over all rows that have a reward, with n - 1 (0 for one row); `reward/frac_zero_std` is the fraction
    of groups whose rewards are all equal, groups of one included. Without any reward the `reward/` keys are absent.
    Lengths are in tokens; tool spans between trained tokens count as response.
    """
    prompt_lengths = np.array([rollout.prompt_length for rollout in rollouts])
    lengths = np.array([len(rollout) for rollout in rollouts])
    metrics = {
        "response_length/mean": float((lengths - prompt_lengths).mean()),
        "prompt_length/mean": float(prompt_lengths.mean()),
    }
    by_group: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            by_group[rollout.group_id].append(rollout.reward)
    if not by_group:
        return metrics
    rewards = np.array([reward for group in by_group.values() for reward in group])
    flat_groups = sum(min(group) == max(group) for group in by_group.values())
    return metrics | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if rewards.size > 1 else 0.0,
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/frac_zero_std": flat_groups / len(by_group),
    }
