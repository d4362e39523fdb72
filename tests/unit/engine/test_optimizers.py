"""Learning rates by step, and optimizers that a machine cannot run refused before anything loads."""

import sys
import types

import pytest
import torch

from megatron_branch.engine.config import OptimizerConfig
from megatron_branch.engine.optimizers import build_optimizer, check_optimizer, learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [round(learning_rate(config, step=step, total_steps=steps), 6) for step in range(1, steps + 1)]


def test_schedules() -> None:
    assert rates(3) == [1, 1, 1]
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert rates(4, schedule="linear", min_lr=0.2) == [0.8, 0.6, 0.4, 0.2]
    assert rates(4, schedule="cosine") == [0.853553, 0.5, 0.146447, 0]
    assert rates(4, schedule="linear", warmup_steps=2) == [0.5, 1, 0.5, 0]


def test_sgd_and_adamw_are_torch_s() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    sgd = build_optimizer(OptimizerConfig(name="sgd", lr=0.5, momentum=0.9, weight_decay=0.1), [parameter])
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.9 and sgd.defaults["weight_decay"] == 0.1
    adam = build_optimizer(OptimizerConfig(name="adamw", lr=0.5, betas=(0.8, 0.9), eps=1e-4), [parameter])
    assert isinstance(adam, torch.optim.AdamW) and adam.defaults["betas"] == (0.8, 0.9) and adam.defaults["eps"] == 1e-4


def test_the_wrong_apex_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    with pytest.raises(ValueError, match="another project"):
        check_optimizer(OptimizerConfig(name="apex_fused_adam"))


def test_a_missing_apex_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ValueError, match="apex"):
        check_optimizer(OptimizerConfig(name="apex_fused_adam"))


def test_a_gpu_optimizer_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="optimizer.name=fused_adam needs a GPU"):
        check_optimizer(OptimizerConfig(name="fused_adam"))
