"""The timeline of a real step: which rank did what when, gathered on the writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_branch.engine.groups import Groups
from megatron_branch.engine.planner import PlannedStep
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.render import chrome_trace, picture
from megatron_branch.schedule.simulate import Simulation, recorded
from megatron_branch.tracking.timers import Timers

PHASES = ("capture", "tail", "replay")
Times = list[tuple[float, float]]


def write_timeline(
    planned: PlannedStep,
    timers: Timers,
    groups: Groups,
    *,
    began: float,
    path: Path,
    simulated: Simulation | None,
    busiest: int,
) -> None:
    """Write a step that has just run (collective; rank 0 writes).

    The ranks are put side by side by the time of day, so hosts should keep theirs by NTP.

    Args:
        planned: the step; the passes of a scoring pass are left out.
        timers: hold the marks of the step.
        groups: the axes.
        began: time of day when this rank's step began, in seconds.
        path: without suffix; `.json` is a Chrome trace with a thread per rank, `.png` the stages of one data-parallel
            rank, simulated and measured.
        simulated: what the picture shows above; None: no picture.
        busiest: the data-parallel rank of the picture.
    """
    actions = sum(action.kind != "idle" for action in planned.order)
    times = timers.spans(PHASES, since="step")
    times = times[len(times) - actions :]  # a scoring pass comes first
    place = (groups.dp.rank, groups.pp.rank, groups.cp.rank, groups.tp.rank)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((place, planned.order, times, began), gathered, dst=0)
    if gathered is None:
        return
    first = min(start for *_, start in gathered)
    every: list[tuple[tuple[int, int, int, int], tuple[Action, ...], Times]] = sorted(
        (
            (place, order, [(start + later - first, end + later - first) for start, end in mine])
            for place, order, mine, later in gathered
        ),
        key=lambda entry: entry[0],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    units = planned.plan.ranks
    events = []
    for row, ((dp, pp, cp, tp), order, mine) in enumerate(every):
        trace = chrome_trace(
            recorded([order], units[dp].units, [mine]), microseconds=1e6, rows=[f"dp {dp} pp {pp} cp {cp} tp {tp}"]
        )
        events += [event | {"tid": row} for event in trace["traceEvents"]]
    path.with_suffix(".json").write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if simulated is None:
        return
    stages = [entry for entry in every if entry[0][0] == busiest and entry[0][2:] == (0, 0)]
    measured = recorded([order for _, order, _ in stages], units[busiest].units, [mine for *_, mine in stages])
    title = f"{path.name}, data-parallel rank {busiest}: simulated"
    picture(simulated, path.with_suffix(".png"), title=title, measured=measured)
