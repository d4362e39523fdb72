from __future__ import annotations

import pytest

from megatron_branch.tracking.metrics import KEYS, METRICS, PHASES, check_keys, metrics_table

# The names that dashboards rely on; a renamed metric is a broken dashboard.
PUBLISHED = """
actor/pg_loss actor/entropy actor/ppo_kl actor/pg_clipfrac actor/grad_norm actor/lr
reward/mean reward/std reward/min reward/max reward/frac_zero_std response_length/mean prompt_length/mean
timing_s/read timing_s/tree timing_s/plan timing_s/capture timing_s/tail timing_s/replay timing_s/optimizer
timing_s/checkpoint timing_s/step
perf/mfu/actor perf/hfu/actor perf/throughput perf/total_num_tokens perf/time_per_step perf/max_memory_allocated_gb
branch/tree_token_ratio branch/shared_tokens branch/tails_per_tree branch/state_bytes_peak branch/bubble_fraction
branch/speedup_bound training/global_step training/consumed_rollouts
""".split()


def test_published_names_are_all_there() -> None:
    assert set(PUBLISHED) <= KEYS


def test_every_key_is_declared_once_and_described() -> None:
    assert len(KEYS) == len(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS)
    assert len(metrics_table().splitlines()) == len(METRICS) + 2


def test_phases_are_those_of_the_table() -> None:
    assert PHASES == ("read", "tree", "plan", "capture", "tail", "replay", "optimizer", "checkpoint", "step")


def test_undeclared_keys_are_refused_by_name() -> None:
    check_keys({"actor/lr": 1.0})
    with pytest.raises(KeyError, match=r"actor/loss, reward/median are not declared"):
        check_keys({"reward/median": 1.0, "actor/loss": 1.0, "actor/lr": 1.0})
