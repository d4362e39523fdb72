"""Draw the two pictures of the README from committed results, as SVG beside them.

Inputs: tools/bench/results/{rollouts,prompt}.json. Outputs: speed.svg (speed-up over dense training against the number
of rollouts, bound of each mode dashed) and memory.svg (peak memory of a step against rollouts and against the prompt).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLOURS = {"dense": "#777777", "exact": "#1f77b4", "exact_retain": "#2ca02c", "detached": "#d62728"}
NAMES = {"dense": "dense", "exact": "exact, recompute", "exact_retain": "exact, retain", "detached": "detached"}


def rows_of(sweep: str, mode: str) -> list[dict[str, Any]]:
    """Rows of one mode of a committed sweep."""
    return [row for row in json.loads((RESULTS / f"{sweep}.json").read_text())["cases"] if row["mode"] == mode]


def speed(axes: Any) -> None:
    """Ratios as points on lines, bounds dashed."""
    for mode in ("exact", "exact_retain", "detached"):
        rows = rows_of("rollouts", mode)
        counts = [row["N"] for row in rows]
        axes.plot(counts, [row["ratio"] for row in rows], "o-", color=COLOURS[mode], label=NAMES[mode])
        axes.plot(counts, [row["bound"] for row in rows], "--", color=COLOURS[mode], linewidth=1)
    axes.axhline(1.0, color=COLOURS["dense"], linewidth=1)
    axes.set(xlabel="rollouts N", ylabel="times as fast as dense training", xscale="log", yscale="log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_title("speed of a step, prompt 2,048, responses 128 (dashed: bound by FLOPs)", fontsize=9)
    axes.legend(fontsize=8)


def memory(by_rollouts: Any, by_prompt: Any) -> None:
    """Peak resident memory of the process."""
    for axes, sweep, key, label in (
        (by_rollouts, "rollouts", "N", "rollouts N (prompt 2,048)"),
        (by_prompt, "prompt", "P", "prompt tokens P (8 rollouts)"),
    ):
        for mode in COLOURS:
            rows = rows_of(sweep, mode)
            axes.plot([r[key] for r in rows], [r["peak_bytes"] / 2**20 for r in rows], "o-", color=COLOURS[mode])
            axes.lines[-1].set_label(NAMES[mode])
        axes.set(xlabel=label, ylabel="peak memory of the process, MiB")
        axes.set_ylim(bottom=0)
    by_rollouts.legend(fontsize=8)


def main() -> int:
    """Write both; 0."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "megatron_branch"  # the same results give the same file
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    speed(axes)
    figure.savefig(RESULTS / "speed.svg", metadata={"Date": None})
    figure, both = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    memory(*both)
    figure.savefig(RESULTS / "memory.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
