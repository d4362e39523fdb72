"""Shows orders and simulations to people: one line, a timeline of characters, a Chrome trace, a picture.

Always true:
- nothing here changes an order; times are in the unit of the simulation's durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import LETTER, Action
from megatron_branch.schedule.names import action_name
from megatron_branch.schedule.simulate import Simulation, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAP = "."
COLOURS = {
    "capture": "#4C78A8",
    "tail forward": "#F2B06B",
    "tail": "#E4812F",
    "replay": "#5B9E6F",
    "idle": "#C9CDD2",
}
LEGEND = ("capture", "tail forward", "tail", "replay", "idle")


def text(order: Sequence[Action], units: Sequence[Unit]) -> str:
    """The order on one line: `C0.0 C0.1 T0.0 T0.1 R0.1 R0.0`."""
    return " ".join(action_name(action, units) for action in order)


def ascii_timeline(simulation: Simulation, width: int = 100) -> str:
    """One row of `width` characters per stage: what runs for most of each character's time.

    `C` capture, `T` tail (`t` its forward half, `T` its backward half where it is split), `R` replay, `.` bubble.
    """
    lines = []
    for stage in range(len(simulation.busy)):
        spans = [span for span in simulation.spans if span.stage == stage]
        lines.append(f"stage {stage} |{_row(spans, simulation.makespan, width)}|")
    return "\n".join(lines)


def _row(spans: Sequence[Span], makespan: float, width: int) -> str:
    cell = makespan / width
    row = []
    next_span = 0
    for column in range(width):
        start, end = column * cell, (column + 1) * cell
        shares = {GAP: end - start}
        while next_span < len(spans) and spans[next_span].end <= start:
            next_span += 1
        for span in spans[next_span:]:
            if span.start >= end:
                break
            share = min(span.end, end) - max(span.start, start)
            mark = _mark(span.action)
            shares[mark] = shares.get(mark, 0.0) + share
            shares[GAP] -= share
        row.append(max(shares, key=lambda mark: shares[mark]) if makespan else GAP)
    return "".join(row)


def _mark(action: Action) -> str:
    letter = LETTER[action.kind]
    return letter.lower() if action.kind == "tail" and action.phase == "forward" else letter


def chrome_trace(simulation: Simulation, *, microseconds: float = 1.0, rows: Sequence[str] = ()) -> dict[str, Any]:
    """Trace-event JSON object for chrome://tracing or Perfetto; one thread per stage.

    Args:
        simulation: simulated or recorded.
        microseconds: of a time unit.
        rows: names of the threads; by default those of the stages.
    """
    names = rows or [f"stage {stage}" for stage in range(len(simulation.busy))]
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(names)
    ]
    for span in simulation.spans:
        events.append(
            {
                "name": span.name,
                "cat": span.action.kind,
                "ph": "X",
                "pid": 0,
                "tid": span.stage,
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": {"slot": span.slot, "phase": span.action.phase},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def picture(simulation: Simulation, path: Path | str, *, title: str = "", measured: Simulation | None = None) -> None:
    """Draw the stages over time into a PNG file, and below them a recorded run of the same order.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ValueError(
            f"a picture of the schedule needs matplotlib ({missing}); install the extra: "
            "pip install 'megatron-branch[plot]'"
        ) from missing
    stages = len(simulation.busy)
    panels = [(simulation, title or f"{stages} stages, bubble {simulation.bubble_fraction:.1%}", "simulated time")]
    if measured is not None:
        panels.append(
            (
                measured,
                f"measured: {measured.makespan:.2f} s, waiting for messages counted to the action that waits",
                "measured time",
            )
        )
    figure = Figure(figsize=(14, len(panels) * (1.5 + 0.6 * stages)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (shown, heading, time) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, shown)
        axes.set_title(heading, loc="left", fontsize=11)
        axes.set_xlabel(f"{time}, share of the step")
    figure.savefig(path)


def _draw(axes: Axes, simulation: Simulation) -> None:
    """Bars by stage and kind, names where they fit, a legend of the kinds that occur."""
    from matplotlib.patches import Patch

    stages = len(simulation.busy)
    readable = 0.008 * simulation.makespan
    kinds = {_kind(span.action) for span in simulation.spans}
    for stage in range(stages):
        for kind in kinds:
            spans = [span for span in simulation.spans if span.stage == stage and _kind(span.action) == kind]
            bars = [(span.start, span.end - span.start) for span in spans]
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.5)
    for span in simulation.spans:
        if span.end - span.start >= readable * len(span.name) * 0.8:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.stage, span.name, ha="center", va="center", fontsize=7, color="white")
    axes.set_xlim(0, simulation.makespan or 1)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_xticks(
        [simulation.makespan * tenth / 10 for tenth in range(11)], [f"{10 * tenth} %" for tenth in range(11)]
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = [kind for kind in LEGEND if kind in kinds]
    patches = [Patch(color=COLOURS[kind], label=kind) for kind in shown]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)


def _kind(action: Action) -> str:
    """Name of the colour."""
    return "tail forward" if action.kind == "tail" and action.phase == "forward" else action.kind
