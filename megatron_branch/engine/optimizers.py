"""Optimizers and the learning rate."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron_branch.engine.config import OptimizerConfig


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ValueError when the optimizer cannot run on this machine, before any weight is read."""
    if config.name == "apex_fused_adam":
        _apex_fused_adam()
    if config.name in ("fused_adam", "apex_fused_adam") and not torch.cuda.is_available():
        raise ValueError(f"optimizer.name={config.name} needs a GPU; set optimizer.name=adamw or cpu_adam")


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer before DeepSpeed wraps it.

    Raises:
        ValueError: see `check_optimizer`.
    """
    check_optimizer(config)
    parameters = list(parameters)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    adam: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, **adam)
    if config.name == "apex_fused_adam":
        return _apex_fused_adam()(parameters, adam_w_mode=True, **adam)
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if config.name == "fused_adam":
        return FusedAdam(parameters, adam_w_mode=True, **adam)
    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **adam)


def _apex_fused_adam() -> Any:
    """NVIDIA apex's FusedAdam.

    Raises:
        ValueError: apex is absent, or the package of that name is the unrelated one.
    """
    remedy = "install NVIDIA apex from its source repository, or set optimizer.name=fused_adam or adamw"
    try:
        return importlib.import_module("apex.optimizers").FusedAdam
    except ModuleNotFoundError as error:
        if error.name == "apex":
            raise ValueError(f"optimizer.name=apex_fused_adam: NVIDIA apex is not installed; {remedy}") from None
        raise ValueError(
            "optimizer.name=apex_fused_adam: the installed package `apex` is not NVIDIA's (the one on PyPI is another "
            f"project); {remedy}"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer.name=apex_fused_adam: apex cannot be used: {error}; {remedy}") from None


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of a step (counted from 1): linear warm-up, then constant, linear or cosine down to `min_lr`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or total_steps <= config.warmup_steps:
        return config.lr
    done = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
