"""Drawings of schedules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.schedule.orders import pipeline_orders
from megatron_branch.schedule.render import ascii_timeline, chrome_trace, picture, text
from megatron_branch.schedule.simulate import Simulation, simulate
from tests.branching import planned, prompt_with_tails, rollout


def simulated() -> Simulation:
    plan, _ = planned(prompt_with_tails(9, [4, 4]), config=BranchConfig(chunk_tokens=4))
    units = plan.ranks[0].units
    return simulate(pipeline_orders(units, 2), units)


def test_two_trees_are_told_apart() -> None:
    plan, _ = planned([rollout([tree, 1, tail], [2]) for tree in (7, 8) for tail in (4, 5)])
    units = plan.ranks[0].units
    (order,) = pipeline_orders(units, 1)
    assert text(order, units) == "C0:0.0 T0:0.0 R0:0.0 C1:0.0 T1:0.0 R1:0.0"


def test_the_timeline_has_a_character_per_four_units_of_time() -> None:
    assert ascii_timeline(simulated(), width=18).splitlines() == [
        "stage 0 |CCtt..TT.TT.RRRRRR|",
        "stage 1 |.CCTTTTTTRRRRRR...|",
    ]
    assert ascii_timeline(simulate([()], ()), width=3) == "stage 0 |...|"


def test_the_trace_holds_every_slot() -> None:
    simulation = simulated()
    events = json.loads(json.dumps(chrome_trace(simulation)))["traceEvents"]
    slots = [event for event in events if event["ph"] == "X"]
    assert len(slots) == len(simulation.spans)
    assert slots[0] == {
        "name": "C0.0",
        "cat": "capture",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 0,
        "dur": 4,
        "args": {"slot": 0, "phase": "forward"},
    }
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["stage 0", "stage 1"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture(simulated(), tmp_path / "schedule.png", title="two stages")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    picture(simulate([()], ()), tmp_path / "empty.png")
    picture(simulated(), tmp_path / "both.png", measured=simulated())
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "schedule.png").stat().st_size


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match=r"megatron-branch\[plot\]"):
        picture(simulated(), tmp_path / "schedule.png")
