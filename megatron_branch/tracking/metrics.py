"""The metrics: declared here before they are logged; the README table and W&B's axis come from this table.

`reduction` says how the value of an optimizer step is made from its passes and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["sum", "mean", "max", "last"]
STEP_KEY = "training/global_step"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    key: str
    unit: str
    reduction: Reduction
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("actor/pg_loss", "1", "sum", "clipped policy-gradient loss, normalised over the step"),
    Metric("actor/entropy", "nat", "mean", "entropy of the policy on trained tokens"),
    Metric("actor/ppo_kl", "nat", "mean", "old minus new log-prob on trained tokens"),
    Metric("actor/pg_clipfrac", "fraction", "mean", "trained tokens whose ratio was clipped"),
    Metric("actor/grad_norm", "1", "last", "global gradient norm before clipping"),
    Metric("actor/lr", "1", "last", "learning rate of the step"),
    Metric("reward/mean", "1", "mean", "reward over the step's rollouts"),
    Metric("reward/std", "1", "mean", "standard deviation of that reward"),
    Metric("reward/min", "1", "last", "smallest reward"),
    Metric("reward/max", "1", "max", "largest reward"),
    Metric("reward/frac_zero_std", "fraction", "mean", "groups whose rollouts all have one reward: they teach nothing"),
    Metric("response_length/mean", "tokens", "mean", "tokens of a rollout after its prompt"),
    Metric("prompt_length/mean", "tokens", "mean", "tokens of a rollout before the first trained one"),
    Metric("timing_s/read", "s", "sum", "reading the rollouts"),
    Metric("timing_s/tree", "s", "sum", "building the trees"),
    Metric("timing_s/plan", "s", "sum", "planning and ordering"),
    Metric("timing_s/capture", "s", "sum", "capture actions, those of a scoring pass included"),
    Metric("timing_s/tail", "s", "sum", "tail actions, those of a scoring pass included"),
    Metric("timing_s/replay", "s", "sum", "replay actions"),
    Metric("timing_s/optimizer", "s", "sum", "gradient reduction, clipping and update"),
    Metric("timing_s/checkpoint", "s", "sum", "saving and exporting"),
    Metric("timing_s/step", "s", "sum", "the whole step"),
    Metric("perf/mfu/actor", "fraction", "mean", "FLOPs of dense training of the same rollouts, over time and peak"),
    Metric("perf/hfu/actor", "fraction", "mean", "FLOPs really executed, over time and peak"),
    Metric("perf/throughput", "tokens/s", "mean", "tokens of dense training per second and device"),
    Metric("perf/total_num_tokens", "tokens", "sum", "inputs that dense training of the step's rollouts computes"),
    Metric("perf/time_per_step", "s", "last", "wall time of the step"),
    Metric(
        "perf/max_memory_allocated_gb", "GiB", "max", "peak memory of the fullest device; of a process without a GPU"
    ),
    Metric(
        "branch/tree_token_ratio", "1", "last", "tokens of dense training per token of the plan, replays not counted"
    ),
    Metric("branch/shared_tokens", "tokens", "last", "tokens of dense training that the plan leaves out"),
    Metric("branch/tails_per_tree", "1", "mean", "tails of a tree"),
    Metric("branch/state_bytes_peak", "bytes", "max", "most bytes of state, adjoints, stage inputs, graphs on a rank"),
    Metric(
        "branch/bubble_fraction", "fraction", "last", "idle share of the pipeline, by the simulation of the schedule"
    ),
    Metric("branch/speedup_bound", "1", "last", "FLOPs of dense training over FLOPs executed"),
    Metric(
        "branch/dense_trees", "trees", "last", "trees whose rollouts ran alone, because sharing would not have paid"
    ),
    Metric("training/global_step", "steps", "last", "optimizer steps taken: the x axis"),
    Metric("training/consumed_rollouts", "rollouts", "last", "rollouts trained on since the start"),
)

KEYS: frozenset[str] = frozenset(metric.key for metric in METRICS)
PHASES: tuple[str, ...] = tuple(
    metric.key.removeprefix("timing_s/") for metric in METRICS if metric.key.startswith("timing_s/")
)


def check_keys(values: Mapping[str, float]) -> None:
    """Raise KeyError that names every key which is not declared."""
    unknown = sorted(set(values) - KEYS)
    if unknown:
        raise KeyError(f"metrics {', '.join(unknown)} are not declared in tracking/metrics.py")


def metrics_table() -> str:
    """The metrics as a Markdown table, for the README."""
    lines = ["| key | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{metric.key}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(lines)
