"""A step leaves nothing behind: what is alive after it does not grow from step to step."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.worker import Worker
from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts
from megatron_branch.schedule.actions import Action
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
    modes = {mode: replace(case, gradient=mode) for mode in ("exact", "detached", "dense")}
    modes["retain"] = replace(case, activations="retain", recompute_layers=True)
    return {mode: in_layout(changed, live_bytes) for mode, changed in modes.items()}


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (1, 1, 2, 1)], ids=["one rank", "two stages"])
def test_nothing_stays_alive(tmp_path: Path, layout: tuple[int, int, int, int]) -> None:
    case = Case(write_tiny_model(tmp_path / "model", "llama"), layout, chunk_tokens=16)
    for modes in run_ranks(layout[2], every_mode, case):
        for mode, alive in modes.items():
            assert len(set(alive[1:])) == 1, (mode, alive)


def held_by_links(worker: Worker) -> list[int]:
    """Most bytes of messages that a step held at once, for 4 and for 24 tails."""
    host = PlainHost(worker.model, worker.groups)
    most = []
    for tails in (4, 24):
        held: list[int] = []

        def look(action: Action, held: list[int] = held) -> None:
            held.append(worker.runtime.link.held_bytes)

        worker.runtime.progress = look
        step = worker.plan(synthetic_rollouts(SyntheticSpec(prefix_tokens=(20,), fan_out=(tails,), tail_tokens=(8,))))
        with host.accumulate():
            worker.run(step)
        worker.score(step, keep=False)
        most.append(max(held))
    return most


def links_of(case: Case) -> list[int]:
    return in_layout(case, held_by_links)


def test_messages_under_way_do_not_grow_with_the_tails(tmp_path: Path) -> None:
    case = Case(write_tiny_model(tmp_path / "model", "llama"), (1, 1, 2, 1), chunk_tokens=8, pack_tokens=8)
    for few, many in run_ranks(2, links_of, case):
        assert 0 < many == few
