"""Weights, gradients, masters and moments on a rank of DeepSpeed take the bytes of `plan/model_bytes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_branch.config import Config, make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.gradient_shards import GradientShards
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.tensor_layout import stage_elements
from megatron_branch.engine.trainer import Trainer
from megatron_branch.plan.model_bytes import HostShape, model_bytes
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout

Layout = tuple[int, int, int, int]  # tp, cp, pp, dp
PERSISTENT, BUCKET = 100, 10_000  # by default a tiny model would stay whole at stage 3, and a bucket take 2 GB
KINDS = ("weights", "gradients", "optimizer")


def configuration(model: Path, layout: Layout, stage: int, dtype: str, reduce: str) -> Config:
    tp, cp, pp, dp = layout
    return make_config(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"rollouts": "unused"},
            "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "zero": {"stage": stage, "reduce": reduce},
        }
    )


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of the tensors after a step, and of the gradients before the next one's passes end."""
    host = trainer.host
    parameters = list(trainer.worker.model.parameters())
    partitions = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    optimizer = getattr(host._optimizer, "optimizer", host._optimizer)
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    masters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    if host.stage == 3:
        masters = [*host._optimizer.fp32_partitioned_groups_flat, host._optimizer.grad_partitions_flat_buffer]
    if host.stage == 0 and masters[0].dtype == parameters[0].dtype:
        masters = []  # the weights themselves
    host._gradients.start()
    if isinstance(host._gradients, GradientShards):
        # With ZeRO 3 the parts are DeepSpeed's buffer, which is counted above.
        sums = [host._gradients.part(name) for name in host._gradients.names() if host.stage == 2]
    else:
        sums = [host._gradients.or_zero(name) for name in host._gradients.names()]
    sizes = {"weights": [*parameters, *partitions], "gradients": sums, "optimizer": [*masters, *moments]}
    return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in sizes.items()}


def measure(model: Path, cases: Sequence[tuple[Layout, int, str, str]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Measured and predicted bytes of this rank by kind."""
    results = []
    device = host_cpu.enter()
    for layout, stage, dtype, reduce in cases:
        config = configuration(model, layout, stage, dtype, reduce)
        tp, cp, pp, dp = layout
        groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp)
        content: dict[str, Any] = {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET}}
        if stage == 3:
            content["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT
        trainer = Trainer(config, check_model(config), groups=groups, device=device, deepspeed_content=content)
        trainer.step(trainer.worker.plan(odd_rollouts(97, 0)), number=1, total_steps=1)
        elements = stage_elements(trainer.worker.arch, tp=tp, pp=pp)[groups.pp.rank]
        size = next(trainer.worker.model.parameters()).element_size()
        host = HostShape(
            stage, groups.dp_cp.size, size, 2, persistent=PERSISTENT, bucket=BUCKET, each_pass=reduce == "pass"
        )
        sizes = model_bytes(elements, host)
        results.append((held(trainer), {kind: getattr(sizes, kind) for kind in KINDS}))
        trainer.host.engine.destroy()
        leave_layout()
    return results


def test_bytes_of_every_stage(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "qwen3", "qwen3", layers=3, tied=True)
    dtypes = ("float32", "bfloat16")
    cases: list[tuple[Layout, int, str, str]] = [((1, 2, 1, 1), s, d, "step") for s in range(4) for d in dtypes]
    cases += [((2, 1, 1, 1), 1, "bfloat16", "step"), ((1, 1, 2, 1), 1, "bfloat16", "step")]
    cases += [((1, 1, 1, 2), 2, "bfloat16", "step")]
    cases += [((1, 2, 1, 1), s, d, "pass") for s in (2, 3) for d in dtypes]
    for rank, results in enumerate(run_ranks(2, measure, folder, cases, timeout_s=120)):
        for case, (measured, predicted) in zip(cases, results, strict=True):
            assert measured == predicted, f"{case}, rank {rank}"
