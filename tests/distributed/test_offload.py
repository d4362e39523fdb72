"""Optimizer and parameter offload to host memory (ZeRO-Offload) leaves the weights of a plain run.

On a CPU both places are the same memory; what is shown is that DeepSpeed's code for offload, which collects and updates
gradients in another way, takes what a step of trees hands over. Copies to and from a GPU are not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_training import LAYOUTS, SGD, STEPS, Run, check
from tests.tiny import write_tiny_model

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS = {"offload_param": {"device": "cpu"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


def offloaded(stage: int, **targets: Any) -> Run:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **targets}
    return Run(f"zero {stage}", LAYOUTS["dp"], stage, SGD, {"zero_optimization": zero})


def test_two_sgd_steps(model: Path) -> None:
    runs = [offloaded(stage, **OPTIMIZER) for stage in (1, 2, 3)]
    parameters = offloaded(3, **PARAMETERS)
    runs += [parameters, replace(parameters, reduce="pass"), offloaded(3, **OPTIMIZER, **PARAMETERS)]
    check(model, runs, STEPS[:2])
