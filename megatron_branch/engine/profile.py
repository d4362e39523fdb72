"""The timeline of a real step: which rank did what when, gathered on the writer."""

from __future__ import annotations

import json
from pathlib import Path

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
    planned: PlannedStep, timers: Timers, groups: Groups, *, path: Path, simulated: Simulation | None, busiest: int
) -> None:
    """Write a step that has just run (collective; rank 0 writes).

    Args:
        planned: the step; the passes of a scoring pass are left out.
        timers: hold the marks of the step, which began right after a barrier.
        groups: the axes.
        path: without suffix; `.json` is a Chrome trace with a thread per rank, `.png` the stages of one data-parallel
            rank, simulated and measured.
        simulated: what the picture shows above; None: no picture.
        busiest: the data-parallel rank of the picture.
    """
    actions = sum(action.kind != "idle" for action in planned.order)
    times = timers.spans(PHASES, since="step")
    times = times[len(times) - actions :]  # a scoring pass comes first
    place = (groups.dp.rank, groups.pp.rank, groups.cp.rank, groups.tp.rank)
    every: list[tuple[tuple[int, int, int, int], tuple[Action, ...], Times]] | None = None
    if dist.get_rank() == 0:
        every = [((0, 0, 0, 0), (), [])] * dist.get_world_size()
    dist.gather_object((place, planned.order, times), every, dst=0)
    if every is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    units = planned.plan.ranks
    every.sort(key=lambda entry: entry[0])
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
