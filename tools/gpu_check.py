"""What `tools/gpu_check.sh` runs on one GPU.

Inputs: none. Outputs: one table with a line per check, and exit status 1 if any is outside its limit or failed.

kernels   the tests marked `gpu`: every attention kernel that is installed against float64
parity    gradients of a step in bfloat16, exact and dense, against dense float64 of the CPU: exact at most twice as far
speed     the benchmark of one step, as a share of its bound
memory    peak of the device's allocator in one exact step of 32K to 256K positions, over what the planner counts
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
POSITIONS = (32768, 65536, 131072, 262144)
MODEL = {"layers": 4, "hidden": 1024, "ffn": 2816, "heads": 8, "kv_heads": 4, "head_dim": 128, "vocab": 32000}
SMALL = {"layers": 4, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 997}
SHARE_OF_BOUND = 0.85
OVER_PLAN = 1.05  # what the planner leaves out is blocks of the allocator
ERROR_OVER_DENSE = 2.0


class Line(NamedTuple):
    """One line of the table: what was looked at, whether it holds, what was found and what is allowed."""

    check: str
    holds: bool
    found: str
    limit: str


def table(lines: Sequence[Line]) -> str:
    """The lines for a person."""
    rows = [("check", "result", "found", "limit")]
    rows += [(line.check, "ok" if line.holds else "FAILED", line.found, line.limit) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def kernels() -> Iterator[Line]:
    """In a pytest of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    yield Line("kernels: tests marked gpu", done.returncode == 0, said[-1] if said else "no output", "all pass")


def parity() -> Iterator[Line]:
    """The truth comes from the tool that anybody checks us with."""
    from megatron_branch.rollouts.synthetic import odd_rollouts, write_rollouts

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_rollouts(folder / "rollouts.jsonl", odd_rollouts(SMALL["vocab"], 0))
        truth = [sys.executable, "tools/dump_step.py", "--model", str(folder / "model"), "--gradient", "dense"]
        truth += ["--rollouts", str(folder / "rollouts.jsonl"), "--out", str(folder / "truth.safetensors")]
        subprocess.run(truth, cwd=ROOT, check=True, capture_output=True)
        error = {}
        for gradient in ("dense", "exact"):
            in_new_process(dump, folder, gradient)
            error[gradient] = distance(folder / f"{gradient}.safetensors", folder / "truth.safetensors")
    ratio = error["exact"] / error["dense"]
    found = f"{ratio:.2f} ({error['exact']:.1e} over {error['dense']:.1e})"
    yield Line("parity: error of exact over dense", ratio <= ERROR_OVER_DENSE, found, f"{ERROR_OVER_DENSE:.2f}")


def write_model(folder: Path) -> None:
    """A random Qwen3 whose weights bfloat16 holds exactly."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=SMALL["layers"],
        hidden_size=SMALL["hidden"],
        intermediate_size=SMALL["ffn"],
        num_attention_heads=SMALL["heads"],
        num_key_value_heads=SMALL["kv_heads"],
        head_dim=SMALL["head_dim"],
        vocab_size=SMALL["vocab"],
        max_position_embeddings=4096,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def dump(folder: Path, gradient: str) -> None:
    """A step on the GPU, written as `tools/dump_step.py` does."""
    from megatron_branch.config import make_config
    from megatron_branch.engine.dump import dump_step
    from tools.bench_step import alone

    alone()
    values = {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "data": {"rollouts": str(folder / "rollouts.jsonl")},
        "branch": {"gradient": gradient, "chunk_tokens": 16, "gate": False},
    }
    dump_step(make_config(values), str(folder / f"{gradient}.safetensors"), False)


def distance(file: Path, truth: Path) -> float:
    """L2 of the difference of all gradients, relative to the truth."""
    from safetensors.torch import load_file

    found, expected = load_file(file), load_file(truth)
    off = sum((found[name].double() - value.double()).square().sum().item() for name, value in expected.items())
    return float((off / sum(value.double().square().sum().item() for value in expected.values())) ** 0.5)


def speed() -> Iterator[Line]:
    """Prompts long enough that the GPU is busy."""
    for case in in_new_process(time_steps):
        limit = f"{SHARE_OF_BOUND:.0%} of the bound"
        found = f"{case.ratio:.2f}x dense, bound {case.bound:.2f}x, {case.share_of_bound:.0%}"
        name = f"speed: P={case.P:,} N={case.N} R={case.R} {case.mode}"
        yield Line(name, case.mode == "dense" or case.share_of_bound >= SHARE_OF_BOUND, found, limit)


def time_steps() -> list[Any]:
    """All modes of one case."""
    from tools.bench_step import Bench, Sizes, parse

    sizes = [word for name, size in MODEL.items() for word in (f"--{name}", str(size))]
    options = parse([*sizes, "--dtype", "bfloat16", "--pack_tokens", "4096"])
    return Bench(options).measure([Sizes(16384, 8, 512)], ("dense", "exact", "exact_retain", "detached"))


def memory() -> Iterator[Line]:
    """Each length in a process of its own."""
    for positions in POSITIONS:
        measured, planned = in_new_process(peak_and_plan, positions)
        found = f"{measured / planned:.3f} ({measured / 2**30:.2f} of {planned / 2**30:.2f} GiB)"
        yield Line(f"memory: {positions:,} positions", measured <= OVER_PLAN * planned, found, f"{OVER_PLAN:.2f}")


def peak_and_plan(positions: int, sizes: dict[str, int] = MODEL, chunk_tokens: int = 16384) -> tuple[int, int]:
    """Peak of the allocator in a step, and the planner's bytes of what the step holds; the host has no optimizer."""
    from megatron_branch.config import make_config
    from megatron_branch.engine.architecture import architecture_from_config
    from megatron_branch.engine.checked import Checked
    from megatron_branch.engine.dump import untimed
    from megatron_branch.engine.estimate import Estimate, busiest_rank
    from megatron_branch.engine.groups import build_groups
    from megatron_branch.engine.plain import PlainHost
    from megatron_branch.engine.random_model import random_source
    from megatron_branch.engine.worker import Worker
    from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts
    from megatron_branch.state.placement import Placement
    from tools.bench_step import alone, peak_bytes

    device = alone()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = make_config(
        {
            "model": {"path": "random", "dtype": dtype},
            "data": {"rollouts": "synthetic"},
            "branch": {"chunk_tokens": chunk_tokens, "pack_tokens": 4096},
        }
    )
    source = random_source(**sizes)
    arch = architecture_from_config(source.config, source="random")
    groups = build_groups(dp=1, cp=1, tp=1, pp=1)
    worker = Worker(config, Checked(source, arch), groups=groups, device=device, timers=untimed)
    host = PlainHost(worker.model, groups)
    response = 512
    spec = SyntheticSpec(
        prefix_tokens=(positions - response,), fan_out=(4,), tail_tokens=(response,), vocab_size=sizes["vocab"]
    )
    rollouts = synthetic_rollouts(spec)
    step = worker.plan(rollouts)

    def run() -> None:
        with host.accumulate():
            worker.run(step)

    measured = peak_bytes(run, device)
    busiest = busiest_rank(step.plan, step.trees, rollouts, pp=1)
    planned = Estimate(config, arch, busiest, placement=Placement()).rank_bytes(0, zero=0).device
    return measured, sum(size for kind, size in planned.items() if kind != "optimizer")


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Memory and Megatron's groups of an earlier check would be in the way."""
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        return fresh.apply(function, arguments)


def main() -> int:
    """0 when every check holds."""
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; install a CUDA build of torch", file=sys.stderr)
        return 1
    lines: list[Line] = []
    for check in (kernels, parity, speed, memory):
        try:
            for line in check():
                print(table([line]).splitlines()[1], flush=True)
                lines.append(line)
        except Exception as error:  # the other checks say something, too
            traceback.print_exception(error)
            lines.append(Line(check.__name__, False, f"{type(error).__name__}: {error}".splitlines()[0], ""))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n{table(lines)}")
    return int(not all(line.holds for line in lines))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
