"""Sums of many passes: bfloat16 gradients add up in float32, and what travels between ranks is float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_branch.config import make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.gradients import Gradients, all_finite
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.trainer import Trainer
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout

PASSES = 256


def summed_over_passes(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulated gradient of a linear layer over many passes, and the float64 sum of each pass's gradient."""
    groups = build_groups(dp=1, cp=1, tp=1, pp=1)
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False).to(dtype)
    gradients = Gradients(layer, groups)
    gradients.start()
    truth = torch.zeros(8, 16, dtype=torch.float64)
    for _ in range(PASSES):
        inputs = torch.randn(5, 16, dtype=dtype)
        layer(inputs).sum().backward()
        truth += torch.ones(8, 5, dtype=torch.float64) @ inputs.double()
    total = gradients.of("weight")
    assert total is not None
    return total.clone(), truth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_error_of_the_sum_does_not_grow_with_the_passes(dtype: torch.dtype) -> None:
    """One pass is rounded by 2**-9 in bfloat16 and independently, so the sum of all is relatively closer than one pass.

    A running bfloat16 sum of 256 passes is off by about 2**-9 * sqrt(256 / 3), 20 times the limit.
    """
    total, truth = run_ranks(1, summed_over_passes, dtype, timeout_s=60)[0]
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = ((total.double() - truth).norm() / truth.norm()).item()
    assert error < {torch.bfloat16: 2**-9, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]


def dtypes_that_travel(model: Path) -> dict[int, set[torch.dtype]]:
    """Per ZeRO stage: dtypes of what is summed over ranks by the last pass and after it (bfloat16 model)."""
    found: dict[int, set[torch.dtype]] = {}
    seen: set[torch.dtype] = set()

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            seen.update(x.dtype for x in tensors if x.is_floating_point() and x.numel() > 16)
            return original(*args, **kwargs)

        return patch.object(dist, name, call)

    # DeepSpeed keeps some of these from its first start on.
    with noting("all_reduce"), noting("reduce"), noting("reduce_scatter_tensor"), noting("reduce_scatter"):
        for stage in range(4):
            config = make_config(
                {
                    "model": {"path": str(model), "dtype": "bfloat16"},
                    "data": {"rollouts": "unused"},
                    "parallel": {"dp": 2},
                    "optimizer": {"name": "sgd", "lr": 0.1, "clip_grad": 0.0},
                    "zero": {"stage": stage},
                }
            )
            groups = build_groups(dp=2, cp=1, tp=1, pp=1)
            trainer = Trainer(config, check_model(config), groups=groups, device=host_cpu.enter(), deepspeed_content={})
            planned = trainer.worker.plan(odd_rollouts(97, 0))
            seen.clear()
            with trainer.host.accumulate():
                trainer.worker.run(planned)
            found[stage] = set(seen)
            trainer.host.engine.destroy()
            leave_layout()
    return found


def test_gradients_travel_in_float32(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3")
    for found in run_ranks(2, dtypes_that_travel, model, timeout_s=100):
        assert found == dict.fromkeys(range(4), {torch.float32})


FINITE = {
    "ordinary": ([[1.0, -2.0], [0.0]], True),
    "NaN on the other rank": ([[1.0], [math.nan]], False),
    "infinity": ([[math.inf, 0.0], [1.0]], False),
    "squares that overflow together": ([[1e19, 1e19], [1e19, 1e19]], False),
    "large": ([[1e18, 1e18], [1e18, 1e18]], True),
    "nothing here": ([[], [1.0]], True),
}


def found_finite() -> list[bool]:
    rank = dist.get_rank()
    found = [all_finite([torch.tensor(parts[rank])], torch.device("cpu")) for parts, _ in FINITE.values()]
    return [*found, all_finite([torch.tensor([1e100], dtype=torch.float64)], torch.device("cpu"))]


def test_gradients_whose_norm_overflows_are_not_finite() -> None:
    """Each number of them may be finite."""
    expected = [truth for _, truth in FINITE.values()] + [True]
    assert run_ranks(2, found_finite) == [expected, expected]
