"""Run a function on several ranks of one machine; the tools' own launcher under the tests' names.

The ranks of all tests are forked from one process that has imported torch, Megatron and DeepSpeed once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

from megatron_branch.engine.local_ranks import LocalRanksError as RankError
from megatron_branch.engine.local_ranks import run_local_ranks

__all__ = ["RankError", "run_ranks"]


def run_ranks(world: int, fn: Callable[..., Any] | str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """See `run_local_ranks`."""
    _start_server()
    return run_local_ranks(world, fn, *args, timeout_s=timeout_s, start_method="forkserver")


@cache
def _start_server() -> None:
    """Start the process that ranks are forked from; it ends with this one."""
    multiprocessing.set_forkserver_preload(["megatron_branch.engine.trainer"])
    with patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
