"""Run a named sweep of benchmarks and write its results with commit, versions and machine.

Inputs: the name of a sweep below. Outputs: a table, and tools/bench/results/NAME.json (or --json FILE).

speed      the sizes that the speed is judged by, in all modes
rollouts   number of rollouts N at P = 2048, R = 128
prompt     prompt length P at N = 8, R = 128
depth      the same prompt as 1, 2 and 3 nested nodes
gate       prompts so short that sharing hardly pays
tails      many short tails against one of as many tokens
cp         one rank with one thread against two context-parallel ranks with one thread each, at P = 16384

All but `cp` run in one process: dense and the other modes in turn, fastest of --repeats, so a ratio is of neighbouring
runs. `bound` is what the plan's FLOPs allow against dense; `recompute_ratio` and `recompute_bound` compare with dense
training that recomputes its layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Sweep:
    """Cases (P, N, R, depth) and the modes of `bench_step` in which each is run."""

    cases: tuple[tuple[int, int, int, int], ...]
    modes: tuple[str, ...]


EVERY_MODE = ("dense", "dense_recompute", "packed", "exact", "exact_retain", "detached")
OURS = ("dense", "exact", "exact_retain", "detached")
SWEEPS = {
    "speed": Sweep(((2048, 8, 128, 1), (4096, 8, 64, 1), (4096, 16, 256, 1)), EVERY_MODE),
    "rollouts": Sweep(tuple((2048, count, 128, 1) for count in (1, 2, 4, 8, 16, 32)), OURS),
    "prompt": Sweep(tuple((prompt, 8, 128, 1) for prompt in (64, 256, 1024, 2048, 4096, 8192)), OURS),
    "depth": Sweep(tuple((2048, 8, 128, depth) for depth in (1, 2, 3)), OURS),
    "gate": Sweep(tuple((prompt, 2, 128, 1) for prompt in (16, 64)), ("dense", "exact")),
    "tails": Sweep(((2048, 32, 16, 1), (2048, 1, 512, 1)), ("dense", "exact")),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*SWEEPS, "cp"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode; the fastest counts (default 3)")
    parser.add_argument("--json", type=Path, help="file to write (default tools/bench/results/NAME.json)")
    return parser.parse_args(arguments)


def run_sweep(name: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one of `SWEEPS`: those of `bench_step`, with depth and the comparison with recomputing dense training."""
    from tools.bench_step import Bench, Sizes
    from tools.bench_step import parse as bench_options

    sweep = SWEEPS[name]
    cases = [Sizes(*sizes) for sizes in sweep.cases]
    rows = Bench(bench_options(["--repeats", str(repeats)])).measure(cases, sweep.modes)
    found = []
    for place, row in enumerate(rows):
        case = place // len(sweep.modes)
        entry = asdict(row) | {"depth": cases[case].depth}
        if "dense_recompute" in sweep.modes:
            dense = rows[case * len(sweep.modes) + sweep.modes.index("dense_recompute")]
            entry["recompute_ratio"] = dense.seconds / row.seconds
            entry["recompute_bound"] = row.bound / dense.bound
        found.append(entry)
    return found


def time_rank(options: argparse.Namespace, cp: int) -> float:
    """Fastest exact step on the ranks of the current world, in seconds (collective)."""
    import torch.distributed as dist

    from tools.bench_step import Bench, Sizes

    bench = Bench(options, cp=cp)
    case = Sizes(16384, 4, 128)
    bench.time(case, "exact")
    dist.barrier()
    return min(bench.time(case, "exact") for _ in range(options.repeats))


def run_cp(repeats: int) -> list[dict[str, Any]]:
    """One rank against two, one thread each."""
    from megatron_branch.engine.local_ranks import run_local_ranks
    from tools.bench_step import parse as bench_options

    options = bench_options(["--repeats", str(repeats), "--threads", "1", "--chunk_tokens", "4096"])
    seconds = {
        cp: max(run_local_ranks(cp, "tools.bench.sweep:time_rank", options, cp, timeout_s=3600)) for cp in (1, 2)
    }
    return [
        {"P": 16384, "N": 4, "R": 128, "cp": cp, "seconds": s, "speedup": seconds[1] / s} for cp, s in seconds.items()
    ]


def main(arguments: Sequence[str]) -> int:
    """Run and write; 0."""
    from megatron_branch.engine.quiet import silence_missing_accelerators
    from tools.bench.facts import provenance

    options = parse(arguments)
    silence_missing_accelerators()
    rows = run_cp(options.repeats) if options.name == "cp" else run_sweep(options.name, options.repeats)
    columns = list(rows[0])
    print("  ".join(f"{column:>15}" for column in columns))
    for row in rows:
        print("  ".join(f"{row[c]:>15.4g}" if isinstance(row[c], float) else f"{row[c]:>15}" for c in columns))
    path = options.json or RESULTS / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sweep": options.name, **provenance(), "cases": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
