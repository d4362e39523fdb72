"""Write the generated tables of the README: configuration keys, metrics, what is supported, a plan, benchmarks.

Inputs: the declarations in the package, the support table below, the plan in configs/plans and the results in
tools/bench/results. Outputs: the README,
each table between its markers `<!-- begin NAME -->` and `<!-- end NAME -->`. With --check nothing is written and a
stale table is an error (exit 1).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_branch.config import config_table
from megatron_branch.tracking.metrics import metrics_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "bench" / "results"


class Support(NamedTuple):
    """One row: `yes` names the test that shows it, `no` and `untested` say what happens instead or why."""

    area: str
    feature: str
    state: str
    note: str


SUPPORT: tuple[Support, ...] = (
    Support("models", "Llama, Qwen2, Qwen3 (dense)", "yes", "tests/parity/test_hf_reference.py"),
    Support("models", "GGUF weights", "yes", "tests/unit/engine/test_hf_source.py"),
    Support("models", "mixture of experts, MLA, sliding window, recurrent layers", "no", "refused by name"),
    Support("models", "dropout, MTP heads, quantised weights", "no", "refused by name"),
    Support("models", "RoPE default, linear, llama3, yarn", "yes", "tests/parity/test_hf_reference.py"),
    Support("models", "other RoPE types", "no", "refused by name"),
    Support(
        "Transformers host",
        "Llama, Qwen2, Qwen3, OLMo-2, Phi-3, Granite: dp, cp, ZeRO 0-3; exact, detached, dense",
        "yes",
        "tests/parity/test_transformers_host.py",
    ),
    Support(
        "Transformers host",
        "other dense families with full attention",
        "untested",
        "compared with their own attention on 12 tokens at each start; refused where logits differ",
    ),
    Support(
        "Transformers host",
        "tp, pp, sequence parallel, retained activations, recomputed layers, GGUF",
        "no",
        "refused by name",
    ),
    Support(
        "Transformers host",
        "experts, sliding window, softcaps, sinks, longrope and dynamic RoPE, dropout",
        "no",
        "refused by name",
    ),
    Support("gradient", "exact, detached, dense", "yes", "tests/parity/test_exact.py"),
    Support("activations", "recompute, retain, auto; layers recomputed", "yes", "tests/parity/test_activations.py"),
    Support(
        "activations",
        "retain and auto with ZeRO 3, or with reduction in every pass and dp > 1",
        "no",
        "refused before weights load",
    ),
    Support(
        "state",
        "on the device, in host memory, in files, `auto`; 1/tp of stage inputs",
        "yes",
        "tests/parity/test_placement.py",
    ),
    Support(
        "state",
        "page-locked memory, copies on a CUDA stream of their own",
        "untested",
        "need a GPU; the order of copies is tested with a double",
    ),
    Support("state", "DeepSpeed's asynchronous file operator", "no", "a thread reads and writes plain files"),
    Support("parallel", "dp, tp, cp (pass-Q), pp and their combinations", "yes", "tests/parity/test_exact.py"),
    Support("parallel", "cp (Ulysses, alone or inside pass-Q), with tp, pp, dp", "yes", "tests/parity/test_ulysses.py"),
    Support("parallel", "sequence parallel (Megatron's)", "yes", "tests/parity/test_sequence_parallel.py"),
    Support("parallel", "expert parallel, interleaved stages", "no", "no such keys"),
    Support(
        "Megatron loop", "its model, DDP, finalising, plain optimizer", "yes", "tests/parity/test_megatron_loop.py"
    ),
    Support("Megatron loop", "Transformer Engine, distributed optimizer, clipping", "untested", "need a GPU"),
    Support("Megatron loop", "recomputation, FSDP, CUDA graphs, other RoPE than plain", "no", "refused by name"),
    Support("ZeRO", "stages 0, 1, 2 in any layout; stage 3 with pp = 1", "yes", "tests/distributed/test_training.py"),
    Support("ZeRO", "stage 3 with pp > 1", "no", "refused before weights load"),
    Support("ZeRO", "reduction in every pass: dp, cp, tp; cp, tp, pp", "yes", "tests/distributed/test_training.py"),
    Support("ZeRO", "reduction in every pass: dp > 1 with pp > 1", "no", "refused by name"),
    Support("ZeRO", "reduction in every pass: optimizer offload", "no", "refused by name"),
    Support("ZeRO", "optimizer and parameter offload to host memory: dp", "yes", "tests/distributed/test_offload.py"),
    Support("ZeRO", "offload from a GPU, to NVMe, or in other layouts", "untested", "keys of a DeepSpeed file"),
    Support("planning", "bytes of weights, gradients, optimizer", "yes", "tests/distributed/test_model_bytes.py"),
    Support("planning", "bytes that collectives of a layer move", "yes", "tests/distributed/test_traffic.py"),
    Support("planning", "seconds on GPUs, buffers of a pass", "untested", "stated rates and upper bounds"),
    Support("planning", "gate: trees not worth sharing run dense", "yes", "tests/parity/test_gate.py"),
    Support("precision", "float64, float32", "yes", "tests/parity/test_exact.py"),
    Support("precision", "bfloat16", "yes", "tests/parity/test_bfloat16.py"),
    Support("precision", "float16, float8", "no", "refused by name"),
    Support("attention", "FlashAttention inside PyTorch, on CPUs", "yes", "tests/unit/attention/test_backends.py"),
    Support(
        "attention",
        "on GPUs: aten, cudnn, flash2, flash3",
        "untested",
        "shapes and arguments are tested around stand-ins; tests of the kernels have the marker gpu",
    ),
    Support("objective", "GRPO with and without std, RLOO, KL, entropy", "yes", "tests/parity/test_objectives.py"),
    Support("objective", "old log-probs by a scoring pass", "yes", "tests/parity/test_scoring.py"),
    Support("objective", "losses that are no sums over tokens: GSPO, DPO", "no", "no such keys"),
    Support("optimizer", "torch AdamW and SGD", "yes", "tests/distributed/test_training.py"),
    Support("optimizer", "DeepSpeed CPU Adam", "untested", "compiles at first use"),
    Support("optimizer", "DeepSpeed fused Adam, NVIDIA apex FusedAdam", "untested", "need a GPU"),
    Support("checkpoints", "saving, Hugging Face export", "yes", "tests/launch/test_training_run.py"),
    Support(
        "checkpoints",
        "bitwise resume, ZeRO 0 to 3; resume in another layout",
        "yes",
        "tests/distributed/test_resume.py",
    ),
    Support("checkpoints", "moments on NVMe, Megatron's torch_dist weights", "no", "refused by name; no such command"),
    Support("machine", "CPU", "yes", "tests/launch/test_training_run.py"),
    Support("machine", "NVIDIA GPUs", "untested", "tools/gpu_check.sh looks at one; not run yet"),
    Support("machine", "several hosts", "untested", "the same code; not run yet"),
    Support("versions", "Python 3.11, megatron-core 0.16.1, DeepSpeed 0.19.8", "yes", "tests/parity/test_exact.py"),
    Support("versions", "Python 3.12, megatron-core 0.19", "untested", "not run yet"),
)


def support_table(rows: Sequence[Support] = SUPPORT) -> str:
    """The support table as Markdown.

    Raises:
        ValueError: a row has an unknown state, or claims `yes` without naming a test that exists.
    """
    lines = ["| area | what | supported | shown by, or note |", "|---|---|---|---|"]
    for row in rows:
        if row.state not in ("yes", "no", "untested"):
            raise ValueError(f"support of {row.feature}: state {row.state!r} must be yes, no or untested")
        if row.state == "yes" and not (row.note.startswith("tests/") and (ROOT / row.note).exists()):
            raise ValueError(f"support of {row.feature}: yes needs the path of a test, not {row.note!r}")
        note = f"`{row.note}`" if row.state == "yes" else row.note
        lines.append(f"| {row.area} | {row.feature} | {row.state} | {note} |")
    return "\n".join(lines)


def plan_table(path: Path = ROOT / "configs" / "plans" / "qwen3_8b_8xh20_2m.json") -> str:
    """A plan that `tools/plan_memory.py --json` wrote, as Markdown."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    winner = plan["winner"]
    (stage,) = winner["bytes"]
    sizes = {**stage["device"], "device, in all": stage["peak"], "host": stage["host"]}
    lines = ["| bytes per rank | GiB |", "|---|---|"]
    lines += [f"| {kind} | {size / 2**30:.1f} |" for kind, size in sizes.items() if size >= 2**26]
    seconds, config = winner["seconds"], winner["config"]
    phases = seconds["phases"]
    total = {kind: sum(v for name, v in parts.items() if name != "hidden_copies") for kind, parts in phases.items()}
    lines += ["", "| seconds | in all | attention | linear layers | copies of state, hidden |", "|---|---|---|---|---|"]
    for kind, parts in phases.items():
        shown = (total[kind], parts["attention"], parts["linear"], parts["hidden_copies"])
        lines.append(f"| {kind} | " + " | ".join(f"{value:,.0f}" for value in shown) + " |")
    parallel, assumed = config["parallel"], ", ".join(f"{name} {value:g}" for name, value in plan["assumed"].items())
    mesh = ", ".join(f"{axis} {parallel[axis]}" for axis in ("tp", "cp", "pp", "dp"))
    often = " reduced in every pass" if config["zero"]["reduce"] == "pass" else ""
    kept = ", ".join(f"{kind} on the {place}" for kind, place in winner["placement"].items())
    lines += [
        "",
        f"One step: {seconds['total']:,.0f} s. Layout: {mesh}, {parallel.get('cp_mode', 'pass_q')}, "
        f"ZeRO {config['zero']['stage']}{often}, chunks of {config['branch']['chunk_tokens']:,} tokens; {kept}. "
        f"Assumed: {assumed}.",
    ]
    return "\n".join(lines)


def speed_table(path: Path = RESULTS / "speed.json") -> str:
    """The sweep `speed` as Markdown."""
    lines = [
        "| P | N | R | mode | times dense speed | bound | share | against dense recomputing | bound | share | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        cells = [f"{row[key]:,}" for key in ("P", "N", "R")] + [row["mode"]]
        for ratio, bound in (("ratio", "bound"), ("recompute_ratio", "recompute_bound")):
            cells += [f"{row[ratio]:.2f}x", f"{row[bound]:.2f}x", f"{row[ratio] / row[bound]:.0%}"]
        lines.append(f"| {' | '.join(cells)} | {row['peak_bytes'] / 2**20:,.0f} |")
    return "\n".join(lines)


def length_table(path: Path = RESULTS / "length.json") -> str:
    """The runs of `tools/bench/length.py` as Markdown."""
    lines = [
        "| positions | gradient | state | seconds | TFLOP | state, MiB a rank | planned | error against dense |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        given = run["arguments"]
        place = next((o.split("=")[1] for o in given["overrides"] if o.startswith("state.placement=")), "device")
        held, planned = (
            sum(run[key][kind] for kind in ("state", "adjoint")) / 2**20
            for key in ("state_bytes", "predicted_state_bytes")
        )
        error = f"{run['error_against_dense']:.1e}" if "error_against_dense" in run else ""
        lines.append(
            f"| {given['positions']:,} | {given['gradient']} | {place} | {run['seconds']:,.0f} | "
            f"{run['executed_flops'] / 1e12:.1f} | {held:.2f} | {planned:.2f} | {error} |"
        )
    return "\n".join(lines)


def slope_table(path: Path = RESULTS / "slope.json") -> str:
    """How peak memory grows with the length, from runs of `tools/bench/length.py` in order of length, as Markdown."""
    lines = ["| positions | peak grows by, MiB | state planned to grow by, MiB | ratio |", "|---|---|---|---|"]
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for short, long in itertools.pairwise(runs):
        grown = long["resident_peak_bytes"] - short["resident_peak_bytes"]
        planned = sum(long["predicted_state_bytes"].values()) - sum(short["predicted_state_bytes"].values())
        lengths = " to ".join(f"{run['arguments']['positions']:,}" for run in (short, long))
        lines.append(f"| {lengths} | {grown / 2**20:.1f} | {planned / 2**20:.1f} | {grown / planned:.3f} |")
    return "\n".join(lines)


def fill(text: str, name: str, table: str) -> str:
    """Replace what stands between the markers of a table.

    Raises:
        ValueError: the markers are not there exactly once.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    filled, found = pattern.subn(lambda _: f"{begin}\n{table}\n{end}", text)
    if found != 1:
        raise ValueError(f"README.md: the markers {begin} ... {end} must stand there once, found {found}")
    return filled


def main(arguments: list[str]) -> int:
    """Run; 0 on success, 1 with one line on standard error otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a table is stale")
    check = parser.parse_args(arguments).check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    try:
        new = old
        tables = {
            "config": config_table(),
            "metrics": metrics_table(),
            "support": support_table(),
            "plan": plan_table(),
            "speed": speed_table(),
            "length": length_table(),
            "slope": slope_table(),
        }
        for name, table in tables.items():
            new = fill(new, name, table)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if check and new != old:
        print("README.md: generated tables are stale; run make readme", file=sys.stderr)
        return 1
    if not check:
        readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
