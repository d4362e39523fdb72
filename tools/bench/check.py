"""Has a step become slower? Run the sweep `speed` again and compare its ratios with the committed ones.

Inputs: tools/bench/results/speed.json. Outputs: a line per case; exit status 1 if a ratio over dense training fell by
more than --allowed (10 % by default: on a shared machine ratios of neighbouring runs move by some 5 %).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str]) -> int:
    """0 when nothing fell, else 1."""
    from tools.bench.sweep import run_sweep

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allowed", type=float, default=0.10, help="relative loss (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    before = {
        (row["P"], row["N"], row["R"], row["mode"]): row["ratio"]
        for row in json.loads((RESULTS / "speed.json").read_text())["cases"]
    }
    slower = 0
    for row in run_sweep("speed", options.repeats):
        key = (row["P"], row["N"], row["R"], row["mode"])
        change = row["ratio"] / before[key] - 1
        verdict = "slower" if change < -options.allowed else "as before"
        slower += verdict == "slower"
        print(f"P={key[0]} N={key[1]} R={key[2]} {key[3]}: {before[key]:.2f}x, now {row['ratio']:.2f}x, {verdict}")
    return int(slower > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
