"""One training step without the optimizer: whole gradients, log-probs and token counts, for anybody to check.

Inputs: a Hugging Face folder and a rollouts file, all rows of which are one step.
Outputs: --out G.safetensors with the unsharded gradients under Hugging Face parameter names, and G.safetensors.json
with loss, grad_norm, trained_tokens, logprobs (one list per row in file order, trained tokens only), tokens (logical,
executed, loss), state_bytes by kind (peak, largest rank) and peak_bytes (of the process, largest rank).

The tool starts tp * cp * pp * dp gloo ranks of its own on this machine. The objective's defaults are GRPO, token-mean
over all rows, clip 0.2 both ways, no KL, temperature 1; key.sub=value arguments change any configuration key.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megatron_branch.config import Config, make_config
from megatron_branch.engine.checked import check_model, check_reduction, check_rows
from megatron_branch.engine.local_ranks import LocalRanksError, run_local_ranks

# Configuration keys that the step depends on, beside those that have an option.
READ = (
    "objective.", "attention.", "state.", "parallel.ulysses_size", "parallel.sequence_parallel", "branch.pack_tokens",
    "branch.gate", "branch.activations", "branch.activation_budget_bytes", "branch.recompute_layers", "zero.reduce",
    "model.gguf_file", "model.host", "seed", "timeout_s",
)  # fmt: skip


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--rollouts", required=True, help="rollouts, JSONL or .jsonl.gz")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    for axis in ("tp", "cp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{axis} ranks (default 1)")
    parser.add_argument(
        "--zero", type=int, choices=range(4), help="through DeepSpeed at this ZeRO stage; implies float32"
    )
    parser.add_argument(
        "--cp_mode", default="pass_q", help="pass_q or ulysses, attention over cp ranks (default pass_q)"
    )
    parser.add_argument("--gradient", choices=["exact", "detached", "dense"], default="exact", help="default exact")
    parser.add_argument("--chunk_tokens", type=int, help="most tokens of a node in one pass (default unlimited)")
    parser.add_argument(
        "--dtype", choices=["float64", "float32", "bfloat16"], help="default float64, float32 with --zero"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help=f"of {', '.join(READ)}")
    return parser.parse_intermixed_args(arguments)


def configure(options: argparse.Namespace) -> Config:
    """The configuration that the command line stands for."""
    if options.zero is not None and options.dtype not in (None, "float32"):
        raise ValueError(
            f"--zero {options.zero} implies float32, but --dtype is {options.dtype}; leave one of them out"
        )
    dtype = options.dtype or ("float64" if options.zero is None else "float32")
    values: dict[str, Any] = {
        "model": {"path": options.model, "dtype": dtype},
        "data": {"rollouts": options.rollouts},
        "parallel": {axis: getattr(options, axis) for axis in ("tp", "cp", "pp", "dp")} | {"cp_mode": options.cp_mode},
        # Every tree is shared unless asked otherwise: what is looked at here is how shared trees compute.
        "branch": {"gradient": options.gradient, "chunk_tokens": options.chunk_tokens, "gate": False},
        "optimizer": {"name": "sgd", "lr": 0.0, "clip_grad": 0.0},
        "zero": {"stage": options.zero or 0},
    }
    config = make_config(values, options.overrides, source="command line")  # first: it knows close names
    for override in options.overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(READ):
            raise ValueError(
                f"command line: {key} has no effect on one step without an optimizer; remove it (layout, dtype, ZeRO "
                f"stage and gradient are options of the tool; {', '.join(READ)} can be set)"
            )
    return config


def check_out(out: Path) -> None:
    """Raise ValueError unless a file can stand there."""
    existing = next(folder for folder in out.absolute().parents if folder.exists())
    if out.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is a folder" if out.is_dir() else f"{existing} is no folder that can be written"
        raise ValueError(f"--out {out}: {reason}; name a file")


def main(arguments: list[str]) -> int:
    """Run; 0 on success, 1 with one line on standard error otherwise."""
    options = parse(arguments)
    try:
        config = configure(options)
        check_out(Path(options.out))
        sizes = config.parallel
        world = sizes.tp * sizes.cp * sizes.pp * sizes.data_parallel(sizes.tp * sizes.cp * sizes.pp)
        check_reduction(config, world)
        check_rows(config, check_model(config).arch)
        run_local_ranks(
            world,
            "megatron_branch.engine.dump:dump_step",
            config,
            options.out,
            options.zero is not None,
            timeout_s=config.timeout_s,
        )
    except (ValueError, LocalRanksError, TimeoutError) as error:
        print(f"dump_step: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
