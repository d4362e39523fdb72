"""A step leaves nothing behind: what is alive after it does not grow from step to step."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, in_layout
from tests.tiny import write_tiny_model

STEPS = 4


def live_bytes(worker: Worker) -> list[int]:
    """Bytes of all tensors that Python can reach, after each step."""
    host = PlainHost(worker.model, worker.groups)
    alive = []
    for _ in range(STEPS):
        step = worker.plan(odd_rollouts(97, 0))
        with host.accumulate():
            worker.run(step)
        del step
        gc.collect()
        alive.append(sum(x.nbytes for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)))
    return alive


def every_mode(case: Case) -> dict[str, list[int]]:
    return {mode: in_layout(replace(case, gradient=mode), live_bytes) for mode in ("exact", "detached", "dense")}


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (1, 1, 2, 1)], ids=["one rank", "two stages"])
def test_nothing_stays_alive(tmp_path: Path, layout: tuple[int, int, int, int]) -> None:
    case = Case(write_tiny_model(tmp_path / "model", "llama"), layout, chunk_tokens=16)
    for modes in run_ranks(layout[2], every_mode, case):
        for mode, alive in modes.items():
            assert len(set(alive[1:])) == 1, (mode, alive)
