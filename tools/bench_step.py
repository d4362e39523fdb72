"""Time one training step dense, exact, exact_retain (no second forward of the prefix) and detached, side by side in
one process, on made-up rollouts and random weights. More modes: dense_recompute (dense, each layer computed again in
the backward) and packed (the tree as one row under a dense mask, tools/bench/packed_tree.py).

Inputs: sizes of the model and of the rollouts (P prompt tokens, N rollouts of R response tokens).
Outputs: a table, and with --json FILE an object whose `cases` list has P, N, R, mode, seconds, dense_seconds, ratio,
bound, share_of_bound, peak_bytes. A ratio is dense time over the mode's time, both the fastest of --repeats
interleaved runs; the bound is dense FLOPs over executed FLOPs by plan/cost.py, which counts every layer whole: a mode
that leaves out the last layer of a loss-free prefix can pass it. peak_bytes is the peak resident size of the process in
that mode, from one more run in a fresh process, with an allocator that returns freed memory at once; on a GPU it is the
peak of torch's allocator.

No optimizer step is timed: it is the same for all modes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# A mode is a gradient, and how activations are kept.
MODES: dict[str, dict[str, Any]] = {
    "dense": {"gradient": "dense"},
    "exact": {},
    "exact_retain": {"activations": "retain"},
    "detached": {"gradient": "detached"},
    "dense_recompute": {"gradient": "dense", "recompute_layers": True},
    "packed": {},
}
DEFAULT_MODES = ("dense", "exact", "exact_retain", "detached")


class Sizes(NamedTuple):
    """A prompt of P tokens in `depth` nested nodes, N rollouts in all, R tokens of response each."""

    P: int
    N: int
    R: int
    depth: int = 1

    def tree(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of the nested nodes, and the fan-out of each; N must divide by two for each level but the last."""
        lengths = [self.P // self.depth] * self.depth
        lengths[0] += self.P - sum(lengths)
        fan_out = [2] * (self.depth - 1) + [self.N >> (self.depth - 1)]
        assert self.N == fan_out[-1] << (self.depth - 1), self
        return tuple(lengths), tuple(fan_out)


@dataclass(frozen=True)
class Runnable:
    """A planned step in one mode: what runs it, and the largest ratio over dense that its FLOPs allow."""

    run: Callable[[], object]
    bound: float


@dataclass(frozen=True)
class BenchCase:
    """One row of the result."""

    P: int
    N: int
    R: int
    mode: str
    seconds: float
    dense_seconds: float
    ratio: float
    bound: float
    share_of_bound: float
    peak_bytes: int


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", metavar="P,N,R", help="may be repeated (default 2048,2,128 2048,8,128 2048,16,128)"
    )
    parser.add_argument("--modes", default=",".join(DEFAULT_MODES), help="comma-separated (default %(default)s)")
    for name, default in {
        "layers": 4, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 2, "head_dim": 32, "vocab": 2048,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="model size (default %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--chunk_tokens", type=int, help="most tokens of a node in one pass (default unlimited)")
    parser.add_argument(
        "--pack_tokens", type=int, default=256, help="most tokens of packed tails (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode; the fastest counts (default 3)")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_args(arguments)


def parse_case(text: str) -> Sizes:
    """`P,N,R` as numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--case {text}: must be three positive integers P,N,R, for example 2048,8,128")
    return Sizes(*(int(part) for part in parts))


class Bench:
    """One model and the means to step it in any mode, on one rank or on the context-parallel ranks of a world."""

    def __init__(self, options: argparse.Namespace, *, cp: int = 1) -> None:
        import torch

        from megatron_branch.config import make_config
        from megatron_branch.engine.architecture import architecture_from_config
        from megatron_branch.engine.checked import Checked
        from megatron_branch.engine.dump import untimed
        from megatron_branch.engine.groups import build_groups
        from megatron_branch.engine.plain import PlainHost
        from megatron_branch.engine.random_model import random_source
        from megatron_branch.engine.worker import Worker

        torch.set_num_threads(options.threads)
        self.device = alone()
        self.options = options
        self.config = make_config(
            {
                "model": {"path": "random", "dtype": options.dtype},
                "data": {"rollouts": "synthetic"},
                "parallel": {"cp": cp},
                "branch": {"chunk_tokens": options.chunk_tokens, "pack_tokens": options.pack_tokens},
            }
        )
        names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
        source = random_source(**{name: getattr(options, name) for name in names})
        checked = Checked(source, architecture_from_config(source.config, source="random"))
        groups = build_groups(dp=1, cp=cp, tp=1, pp=1)
        self.worker = Worker(self.config, checked, groups=groups, device=self.device, timers=untimed)
        self.host = PlainHost(self.worker.model, groups)
        self.worker.runtime.loss_scale = self.host.loss_scale

    def measure(self, cases: Sequence[Sizes], modes: Sequence[str]) -> list[BenchCase]:
        """All modes of every case: first the times, interleaved, then the peaks."""
        steps = {case: self._plan(case, ("dense", *modes)) for case in cases}
        seconds = {case: self._times(steps[case]) for case in cases}
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            peaks = fresh.apply(measure_peaks, (self.options, cases, modes))
        rows = []
        for case in cases:
            for mode in modes:
                mine, dense, bound = seconds[case][mode], seconds[case]["dense"], steps[case][mode].bound
                sizes, peak = case[:3], peaks[case, mode]
                rows.append(BenchCase(*sizes, mode, mine, dense, dense / mine, bound, dense / mine / bound, peak))
        return rows

    def time(self, case: Sizes, mode: str) -> float:
        """Seconds of one run."""
        return self._time(self._plan(case, [mode])[mode])

    def peaks(self, cases: Sequence[Sizes], modes: Sequence[str]) -> dict[Any, int]:
        """Peak bytes by case and mode."""
        return {(case, mode): self._peak(self._plan(case, [mode])[mode]) for case in cases for mode in modes}

    def _plan(self, case: Sizes, modes: Sequence[str]) -> dict[str, Runnable]:
        from megatron_branch.plan.cost import plan_flops
        from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
        from tools.bench.packed_tree import PackedStep

        lengths, fan_out = case.tree()
        vocab = self.options.vocab
        spec = SyntheticSpec(prefix_tokens=lengths, fan_out=fan_out, tail_tokens=(case.R,), vocab_size=vocab)
        rollouts = synthetic_rollouts(spec)
        steps: dict[str, Runnable] = {}
        for mode in dict.fromkeys(modes):
            section = self.config.branch.model_copy(update=MODES[mode])
            step = self.worker.plan(rollouts, branch=section)
            flops = plan_flops(step.plan, step.trees, self.worker.arch.shape())
            if mode == "packed":
                packed = PackedStep(self.worker, step)
                steps[mode] = Runnable(packed.run, flops.dense / packed.flops())
            else:
                steps[mode] = Runnable(partial(self.worker.run, step), flops.bound)
        return steps

    def _run(self, step: Runnable) -> None:
        with self.host.accumulate():
            step.run()

    def _time(self, step: Runnable) -> float:
        import torch

        gc.collect()
        start = time.perf_counter()
        self._run(step)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _times(self, steps: dict[str, Runnable]) -> dict[str, float]:
        """Fastest run of each mode, in seconds."""
        fastest = dict.fromkeys(steps, float("inf"))
        for _ in range(self.options.repeats):
            for mode, step in steps.items():
                fastest[mode] = min(fastest[mode], self._time(step))
        return fastest

    def _peak(self, step: Runnable) -> int:
        return peak_bytes(partial(self._run, step), self.device)


def alone() -> torch.device:
    """Enter a world, of this process alone unless there is one; the device to work on."""
    import torch

    from megatron_branch.engine import host_cpu

    device = host_cpu.enter()
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    return device


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak of one run: of torch's allocator on a GPU, of the resident size of the process on a CPU (Linux)."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # starts the kernel's record of the peak anew
    run()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")


def measure_peaks(options: argparse.Namespace, cases: Sequence[Sizes], modes: Sequence[str]) -> dict[Any, int]:
    """In a process that has run nothing else: memory freed by earlier runs would count."""
    from megatron_branch.engine.quiet import silence_missing_accelerators

    silence_missing_accelerators()
    _return_freed_memory()
    return Bench(options).peaks(cases, modes)


def _return_freed_memory() -> None:
    """Make the C allocator give back what is freed, so that peaks do not depend on what ran before (glibc)."""
    library = ctypes.CDLL(None)
    for parameter, value in ((-3, 64 * 1024), (-1, 64 * 1024)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        library.mallopt(parameter, value)
    library.malloc_trim(0)


def table(rows: Sequence[BenchCase]) -> str:
    """The rows for a person."""
    lines = [
        f"{'P':>7} {'N':>4} {'R':>6} {'mode':<15} {'seconds':>9} {'ratio':>7} {'bound':>7} {'share':>7} {'peak MiB':>9}"
    ]
    for row in rows:
        lines.append(
            f"{row.P:>7} {row.N:>4} {row.R:>6} {row.mode:<15} {row.seconds:>9.3f} {row.ratio:>6.2f}x "
            f"{row.bound:>6.2f}x {100 * row.share_of_bound:>6.1f}% {row.peak_bytes / 2**20:>9.1f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run; 0 on success, 1 with one line on standard error otherwise."""
    from megatron_branch.engine.quiet import silence_missing_accelerators

    options = parse(arguments)
    silence_missing_accelerators()
    try:
        cases = [parse_case(text) for text in options.case or ["2048,2,128", "2048,8,128", "2048,16,128"]]
        modes = options.modes.split(",")
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise ValueError(f"--modes {options.modes}: {unknown[0]!r} is none of {', '.join(MODES)}")
        bench = Bench(options)
    except ValueError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 1
    rows = bench.measure(cases, modes)
    print(table(rows))
    if options.json is not None:
        result: dict[str, Any] = {
            "machine": f"{platform.machine()}, {options.threads} threads",
            "options": {key: value for key, value in vars(options).items() if key not in ("json", "case")},
            "cases": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
