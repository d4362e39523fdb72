"""Throughput and utilisation of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed, over all ranks.

    Attributes:
        dense_flops: FLOPs of dense training of the same rollouts, without recomputation.
        executed_flops: FLOPs really executed, recomputation and scoring included.
        logical_tokens: inputs of dense training.
    """

    dense_flops: float
    executed_flops: float
    logical_tokens: int


def perf_metrics(work: StepWork, *, seconds: float, devices: int, peak_flops: float | None) -> dict[str, float]:
    """The `perf/` metrics of a step.

    mfu counts useful work, so sharing raises it, beyond 1 where much is shared; hfu counts what the devices did and
    stays below 1. Without `peak_flops` (FLOP/s of one device) both are left out.
    """
    metrics = {
        "perf/total_num_tokens": float(work.logical_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": work.logical_tokens / (seconds * devices),
    }
    if peak_flops is not None:
        available = seconds * devices * peak_flops
        metrics["perf/mfu/actor"] = work.dense_flops / available
        metrics["perf/hfu/actor"] = work.executed_flops / available
    return metrics
