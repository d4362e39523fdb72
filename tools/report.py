"""A run as one HTML page: curves, tokens saved, memory, timeline of the ranks, configuration.

Input: the folder of a run (`tracking.run_dir`), finished, broken off or still going on.
Output: RUN/report.html, or `--out`. The page holds its pictures itself, so it can be sent and opened anywhere.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_branch.tracking.jsonl import read_metrics
from megatron_branch.tracking.metrics import METRICS, STEP_KEY, Metric
from megatron_branch.tracking.tracker import CONFIG_FILE, METRICS_FILE

Row = Mapping[str, Any]
KINDS = ("capture", "tail", "replay")
SECTIONS = {
    "Training": ("actor/", "reward/", "response_length/", "prompt_length/", "training/consumed"),
    "Tokens saved": ("branch/tree", "branch/shared", "branch/tails", "branch/speedup", "branch/dense", "perf/total"),
    "Memory": ("perf/max_memory", "branch/state_bytes"),
    "Time": ("timing_s/", "perf/mfu", "perf/hfu", "perf/throughput", "perf/time", "branch/bubble"),
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-size: 13px; } svg { width: 100%; height: auto; }
svg text { fill: currentColor; font-size: 12px; } img { max-width: 100%; background: white; }
.line { fill: none; stroke: #3b82f6; stroke-width: 2; } .dot { fill: #3b82f6; } .axis { stroke: #888; }
.capture { fill: #3b82f6; } .tail { fill: #f59e0b; } .replay { fill: #10b981; }
table { border-collapse: collapse; } td, th { padding: 2px 12px; border-bottom: 1px solid #8886; text-align: right; }
pre { overflow-x: auto; border: 1px solid #8886; padding: 1em; }
"""


def read_run(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run by step; of a step that is there twice the last row counts.

    Raises:
        ValueError: the folder is no run, or its metrics are not readable.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {METRICS_FILE} there; give the folder of a run (tracking.run_dir)")
    try:
        rows = {int(row[STEP_KEY]): row for row in read_metrics(path)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a whole line is not a row of metrics with {STEP_KEY} ({error})") from None
    if not rows:
        raise ValueError(f"{path}: no whole row yet; wait for the first step to end")
    return [rows[step] for step in sorted(rows)]


def points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """Step and value where there is a finite number."""
    found = [(int(row[STEP_KEY]), row.get(key)) for row in rows]
    return [(step, float(value)) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def short(value: float) -> str:
    """A number in at most seven characters: 0.0304, 9.2e-07, 1,366, 11.1k, 63.5M."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if suffix == 'k' else factor):.3g}{suffix}"
    if abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.3g}"


def curve(metric: Metric, rows: Sequence[Row]) -> str:
    """A metric over the steps, as a figure; empty if no row has a value. Steps without one leave a gap."""
    known = dict(points(rows, metric.key))
    if not known:
        return ""
    low, high = min(known.values()), max(known.values())
    first, last = int(rows[0][STEP_KEY]), int(rows[-1][STEP_KEY])

    def at(step: int) -> str:
        x = 60 + 270 * (step - first) / (last - first) if last > first else 195.0
        y = 130 - 110 * (known[step] - low) / (high - low) if high > low else 75.0
        return f"{x:.1f},{y:.1f}"

    pieces: list[list[int]] = [[]]
    for row in rows:
        if int(row[STEP_KEY]) in known:
            pieces[-1].append(int(row[STEP_KEY]))
        else:
            pieces.append([])
    lines = [f'<polyline class="line" points="{" ".join(map(at, piece))}"/>' for piece in pieces if len(piece) > 1]
    if len(known) <= 50:
        spots = [at(step).split(",") for step in known]
        lines += [f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>' for x, y in spots]
    shown = [f'<text x="55" y="24" text-anchor="end">{short(high)}</text>'] if high > low else []
    shown += [
        f'<text x="55" y="{134 if high > low else 79}" text-anchor="end">{short(low)}</text>',
        f'<text x="60" y="158">step {first}</text><text x="330" y="158" text-anchor="end">{last}</text>',
        '<line class="axis" x1="60" y1="140" x2="330" y2="140"/><line class="axis" x1="60" y1="15" x2="60" y2="140"/>',
    ]
    caption = f"<b>{escape(metric.key)}</b> [{escape(metric.unit)}]: {escape(metric.meaning)}"
    drawing = f'<svg viewBox="0 0 340 165" role="img" aria-label="{escape(metric.key)}">{"".join(lines + shown)}</svg>'
    return f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>"


def savings(rows: Sequence[Row]) -> str:
    """Tokens of the whole run, of the rows that hold both numbers."""
    logical, shared = dict(points(rows, "perf/total_num_tokens")), dict(points(rows, "branch/shared_tokens"))
    both = logical.keys() & shared.keys()
    dense = sum(logical[step] for step in both)
    computed = dense - sum(shared[step] for step in both)
    if computed <= 0:
        return ""
    text = f"{dense:,.0f} tokens in dense training, {computed:,.0f} in the plans, replays not counted"
    return f"<p>{text}: x{dense / computed:.2f} fewer ({len(both)} steps).</p>"


def timeline(path: Path) -> str:
    """The ranks of a recorded step over time, and how long each was busy.

    Raises:
        ValueError: the file is no timeline.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {event["tid"]: str(event["args"]["name"]) for event in events if event["ph"] == "M"}
        spans = [event for event in events if event["ph"] == "X"]
        busy: dict[tuple[int, str], float] = defaultdict(float)
        for span in spans:
            busy[span["tid"], span["cat"]] += span["dur"] / 1e6
        end = max((span["ts"] + span["dur"] for span in spans), default=0.0) or 1.0
        bars = [_bar(span, 850 / end) for span in spans if span["cat"] in KINDS]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a timeline of a step ({error!r}); remove it to leave it out") from None
    labels = [f'<text x="0" y="{24 * row + 15}">{escape(name)}</text>' for row, name in names.items()]
    height = 24 * len(names) + 24
    axis = f'<text x="1000" y="{height - 6}" text-anchor="end">{end / 1e6:.3g} s</text>'
    drawing = f'<svg viewBox="0 0 1000 {height}" role="img">{"".join([*labels, *bars, axis])}</svg>'
    lines = []
    for kind in KINDS:
        seconds = [busy[row, kind] for row in names]
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        if mean > 0:
            slowest = names[max(names, key=lambda row, kind=kind: busy[row, kind])]
            cells = [f"{mean:.3f}", f"{max(seconds):.3f}", f"{max(seconds) / mean:.2f}", escape(slowest)]
            lines.append(f"<tr><th>{kind}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    each = [
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{busy[row, kind]:.3f}</td>' for kind in KINDS)}</tr>"
        for row, name in names.items()
    ]
    return (
        f"<h3>{escape(path.stem)}</h3>{drawing}<p>Blue: capture, amber: tail, green: replay. Waiting for messages "
        "counts to the action that waits.</p><table><tr><th>busy</th><th>mean s</th><th>max s</th><th>max/mean</th>"
        f"<th>slowest rank</th></tr>{''.join(lines)}</table><table><tr><th>rank, s</th>"
        f"{''.join(f'<th>{kind}</th>' for kind in KINDS)}</tr>{''.join(each)}</table>"
        + picture(path.with_suffix(".png"))
    )


def _bar(span: Mapping[str, Any], scale: float) -> str:
    x, width = 150 + span["ts"] * scale, max(span["dur"] * scale, 0.3)
    title = f"<title>{escape(str(span['name']))}: {span['dur'] / 1e6:.3f} s</title>"
    place = f'x="{x:.2f}" y="{24 * span["tid"] + 2}" width="{width:.2f}" height="18"'
    return f'<rect class="{span["cat"]}" {place}>{title}</rect>'


def picture(path: Path) -> str:
    """A PNG file inside the page; empty if there is none."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{escape(path.name)}" src="data:image/png;base64,{data}"></p>'


def page(folder: Path) -> str:
    """The whole page.

    Raises:
        ValueError: the folder is no run, or a file of it cannot be read.
    """
    rows = read_run(folder)
    name = escape(folder.resolve().name)
    body = [f"<h1>{name}</h1><p>{len(rows)} steps, {rows[0][STEP_KEY]:.0f} to {rows[-1][STEP_KEY]:.0f}</p>"]
    for title, prefixes in SECTIONS.items():
        figures = "".join(curve(metric, rows) for metric in METRICS if metric.key.startswith(prefixes))
        extra = savings(rows) if title == "Tokens saved" else ""
        body.append(f'<h2>{title}</h2>{extra}<div class="curves">{figures or "<p>no values</p>"}</div>')
    recorded = sorted((folder / "timeline").glob("step_*.json"), key=lambda path: (len(path.name), path.name))
    hint = "<p>No step was recorded; <code>tracking.profile_steps=1</code> records the first.</p>"
    body.append(f"<h2>Timeline</h2>{picture(folder / 'schedule.png')}{''.join(map(timeline, recorded)) or hint}")
    config = folder / CONFIG_FILE
    text = escape(config.read_text(encoding="utf-8")) if config.is_file() else f"no {CONFIG_FILE} in the folder"
    body.append(f"<h2>Configuration</h2><pre>{text}</pre>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, help="file to write (default: RUN/report.html)")
    options = parser.parse_args(arguments)
    out = options.out or options.run / "report.html"
    try:
        out.write_text(page(options.run), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
