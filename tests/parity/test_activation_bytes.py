"""The bytes that a pass's graph saves, measured with hooks on every saved tensor, are those of the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_branch.engine.architecture import stage_layers
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.plan.activations import activation_sizes
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, in_layout
from tests.tiny import Family, write_tiny_model

LAYOUTS = {1: [(1, 1, 1, 1)], 4: [(2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1)]}
# The loss table's entries, some 30 bytes a row, are not in the formula; a layer's smallest term is 1 % of it.
LOSS_TABLE = 0.01
ROWS = SyntheticSpec(prefix_tokens=(64,), fan_out=(1,), tail_tokens=(64,))


def saved_bytes(worker: Worker) -> tuple[int, int]:
    """Measured and predicted bytes of the graph of one dense pass on this rank."""
    host = PlainHost(worker.model, worker.groups)
    step = worker.plan(synthetic_rollouts(ROWS))
    (unit,) = step.units
    known = {parameter.untyped_storage().data_ptr() for parameter in worker.model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with host.accumulate(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        worker.run(step)
    groups, arch = worker.groups, worker.arch
    sizes = activation_sizes(
        arch.shape(),
        qk_norm=arch.qk_norm,
        dtype_bytes=next(worker.model.parameters()).element_size(),
        tp=groups.tp.size,
        cp=groups.cp.size,
    )
    tensors = step.batch.tensors(unit.index)
    assert tensors.head is not None
    predicted = sizes.pass_bytes(
        tensors.shard.local,
        layers=stage_layers(arch, groups.pp.size)[groups.pp.rank],
        first=groups.first_stage,
        rows=len(tensors.head.offsets) if groups.last_stage else None,
    )
    return sum(storage.nbytes() for storage in storages.values()), predicted


def measure(cases: list[Case]) -> list[tuple[int, int]]:
    return [in_layout(case, saved_bytes) for case in cases]


@pytest.mark.parametrize("world", LAYOUTS)
def test_saved_tensors_are_those_of_the_formula(tmp_path: Path, world: int) -> None:
    cases = []
    families: tuple[tuple[Family, int | None], ...] = (("qwen3", 16), ("qwen2", None))
    for family, head_dim in families:
        folder = write_tiny_model(
            tmp_path / family, family, layers=3, hidden=64, ffn=192, heads=8, kv_heads=2, head_dim=head_dim
        )
        for layout in LAYOUTS[world]:
            cases += [Case(folder, layout, "dense", dtype=dtype) for dtype in ("bfloat16", "float32")]
    for rank, results in enumerate(run_ranks(world, measure, cases, timeout_s=120)):
        for case, (measured, predicted) in zip(cases, results, strict=True):
            assert abs(measured / predicted - 1) < LOSS_TABLE, f"{case}, rank {rank}: {measured} against {predicted}"
