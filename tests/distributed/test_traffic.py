"""The bytes that a pass receives in its layers' collectives are those of `plan/traffic.py`, counted at the calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from megatron_branch.attention import mirror, pass_q
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.plan.traffic import Split, context_parallel_bytes, tensor_parallel_bytes
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, in_layout
from tests.tiny import write_tiny_model

ROWS = SyntheticSpec(prefix_tokens=(40,), fan_out=(1,), tail_tokens=(25,))
LAYERS = 2


class Counter:
    """Bytes received, were each collective a ring."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.reduced: list[int] = []

    def ring(self, call: Callable[..., Any], whole: int) -> Callable[..., Any]:
        """Counts the argument number `whole`, the tensor that is gathered, scattered or exchanged."""

        def counted(*tensors: Tensor, group: Any) -> Any:
            ranks = dist.get_world_size(group)
            self.bytes += tensors[whole].nbytes * (ranks - 1) / ranks
            return call(*tensors, group=group)

        return counted

    def all_reduce(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Notes the sizes."""

        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.reduced.append(tensor.nbytes)
            return call(tensor, *args, **options)

        return counted


def received(worker: Worker) -> tuple[float, float, float, float]:
    """Measured and predicted bytes of one dense pass: of context parallelism, of tensor parallelism."""
    host, counter = PlainHost(worker.model, worker.groups), Counter()
    step = worker.plan(synthetic_rollouts(ROWS))
    sizes = worker.config.parallel
    with host.accumulate(), ExitStack() as patches:
        for owner, name, whole in (
            (mirror, "all_gather_single", 0),
            (mirror, "reduce_scatter_single", 1),
            (pass_q, "all_gather_single", 0),
            (dist, "all_to_all_single", 0),
        ):
            patches.enter_context(patch.object(owner, name, counter.ring(getattr(owner, name), whole)))
        patches.enter_context(patch.object(dist, "all_reduce", counter.all_reduce(dist.all_reduce)))
        worker.run(step)
    local = step.batch.shard(step.units[0]).local
    size = next(worker.model.parameters()).element_size()
    shape, split = worker.arch.shape(), Split(sizes.tp, sizes.cp, size, sizes.ulysses)
    hidden = local * shape.hidden * size
    # One more than the layers make: the embedding's, whose rows are spread over the ranks.
    calls = max(counter.reduced.count(hidden) - 1, 0)
    reduced = calls * 2 * hidden * (sizes.tp - 1) / sizes.tp
    forward, backward = context_parallel_bytes(local, shape, split)
    predicted = LAYERS * 2 * tensor_parallel_bytes(local, shape, split)
    return counter.bytes, LAYERS * (forward + backward), reduced, predicted


def measure(cases: list[Case]) -> list[tuple[float, float, float, float]]:
    return [in_layout(case, received) for case in cases]


def test_collectives_of_a_pass(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "qwen3", "qwen3", layers=LAYERS, heads=8, kv_heads=2)
    layouts = [((1, 4, 1, 1), 1), ((1, 4, 1, 1), 2), ((1, 4, 1, 1), 4), ((2, 2, 1, 1), 1), ((2, 2, 1, 1), 2)]
    cases = [Case(folder, layout, "dense", dtype="bfloat16", ulysses=ulysses) for layout, ulysses in layouts]
    for rank, results in enumerate(run_ranks(4, measure, cases, timeout_s=120)):
        for case, (moved, predicted, reduced, predicted_reduced) in zip(cases, results, strict=True):
            assert moved == predicted > 0, f"{case}, rank {rank}"
            assert reduced == predicted_reduced, f"{case}, rank {rank}"
            assert (reduced > 0) == (case.layout[0] > 1)
