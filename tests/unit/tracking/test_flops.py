from __future__ import annotations

import pytest

from megatron_branch.tracking.flops import StepWork, perf_metrics

WORK = StepWork(dense_flops=8e12, executed_flops=2e12, logical_tokens=6000)


def test_utilisation_counts_all_devices() -> None:
    metrics = perf_metrics(WORK, seconds=2.0, devices=4, peak_flops=1e12)
    assert metrics == pytest.approx(
        {
            "perf/total_num_tokens": 6000,
            "perf/time_per_step": 2.0,
            "perf/throughput": 750.0,
            "perf/mfu/actor": 1.0,
            "perf/hfu/actor": 0.25,
        },
        rel=1e-12,
    )


def test_no_utilisation_without_a_peak() -> None:
    assert not {"perf/mfu/actor", "perf/hfu/actor"} & set(perf_metrics(WORK, seconds=1.0, devices=1, peak_flops=None))
