"""Show how one step of a rollouts file is scheduled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_branch.plan.build import make_plan
from megatron_branch.plan.cost import ModelShape, plan_flops
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.plan.tables import loss_rows
from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.durations import flop_durations
from megatron_branch.schedule.orders import pipeline_orders
from megatron_branch.schedule.render import ascii_timeline, chrome_trace, picture, text
from megatron_branch.schedule.rules import assert_valid
from megatron_branch.schedule.simulate import Simulation, simulate
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree
from megatron_branch.tree.stats import tree_stats

DESCRIPTION = """Show how one step of rollouts is scheduled: tree statistics, the order of every pipeline stage, a
simulated timeline, bubble, peak state and the bound on the speed-up over dense training. All rows of the file are one
step.

input:  a rollouts file (JSONL, .gz accepted)
output: text on the console; on request a Chrome trace (JSON) and a picture (PNG) of one data-parallel rank"""
SIZES = "layers,hidden,ffn,heads,kv_heads,head_dim,vocab"
QWEN3_8B = "36,4096,12288,32,8,128,151936"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=Path, help="rollouts file, .jsonl or .jsonl.gz")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks; peak state is shown per rank")
    parser.add_argument("--chunk_tokens", type=int, help="most tokens of one node in a pass (default: unlimited)")
    parser.add_argument("--pack_tokens", type=int, default=2048, help="most tokens of packed tails (default 2048)")
    parser.add_argument("--gradient", choices=("exact", "detached", "dense"), default="exact")
    parser.add_argument("--gate", action="store_true", help="as training: no sharing in trees where it would not pay")
    parser.add_argument("--shape", default=QWEN3_8B, help=f"{SIZES} of the model (default: Qwen3-8B, {QWEN3_8B})")
    parser.add_argument(
        "--rank", type=int, default=0, help="data-parallel rank of the trace and the picture (default 0)"
    )
    parser.add_argument("--width", type=int, default=100, help="characters of the timeline (default 100)")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here")
    parser.add_argument("--picture", type=Path, help="write a PNG here (needs matplotlib)")
    return parser.parse_args(arguments)


def parse_shape(sizes: str) -> ModelShape:
    parts = sizes.split(",")
    if len(parts) != 7 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shape {sizes}: must be seven positive integers, {SIZES}; for example {QWEN3_8B}")
    return ModelShape(*map(int, parts))


def simulate_rank(
    units: Sequence[Unit], trees: Sequence[Tree], rollouts: Sequence[Rollout], *, stages: int, shape: ModelShape
) -> tuple[Simulation, list[str]]:
    """The simulation of one data-parallel rank, and its order per stage as text."""
    heads = [len(loss_rows(unit, trees, rollouts).rows) for unit in units]
    duration = flop_durations(units, shape, stages=stages, loss_rows=heads)
    orders = pipeline_orders(units, stages, duration=duration)
    assert_valid(orders, units)
    return simulate(orders, units, duration=duration), [text(order, units) for order in orders]


def show(options: argparse.Namespace) -> None:
    for name in ("pp", "dp", "cp", "pack_tokens", "width"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(f"--chunk_tokens {options.chunk_tokens}: must be at least 1; leave it out for no limit")
    if not 0 <= options.rank < options.dp:
        raise ValueError(f"--rank {options.rank}: must be below --dp {options.dp}")
    shape = parse_shape(options.shape)
    if options.pp > shape.layers:
        raise ValueError(f"--pp {options.pp}: must be at most the {shape.layers} layers of --shape; lower it")
    config = BranchConfig(
        gradient=options.gradient,
        chunk_tokens=options.chunk_tokens,
        pack_tokens=options.pack_tokens,
        gate=options.gate,
    )
    rollouts = list(read_rollouts(options.rollouts))
    trees = build_trees(rollouts, share=config.gradient != "dense")
    layout = Layout(dp=options.dp, cp=options.cp, pp=options.pp)
    trees = gate_trees(trees, rollouts, config=config, layout=layout, shape=shape)
    plan = make_plan(trees, rollouts, config=config, layout=layout, aggregation="token-mean", shape=shape)
    print(tree_stats(trees, rollouts).text())
    simulations = show_ranks(plan, trees, rollouts, shape=shape, options=options)
    flops = plan_flops(plan, trees, shape)
    print(
        f"tokens: dense {plan.logical_tokens:,}, computed {plan.executed_tokens:,}, head {plan.loss_tokens:,}; "
        f"FLOPs: dense {flops.dense:.3g}, executed {flops.executed:.3g}; speed-up bound x{flops.bound:.2f}"
    )
    if options.trace:
        options.trace.write_text(json.dumps(chrome_trace(simulations[options.rank])))
        print(f"trace: {options.trace}")
    if options.picture:
        picture(simulations[options.rank], options.picture)
        print(f"picture: {options.picture}")


def show_ranks(
    plan: Plan, trees: Sequence[Tree], rollouts: Sequence[Rollout], *, shape: ModelShape, options: argparse.Namespace
) -> list[Simulation]:
    """Print the schedule of every data-parallel rank."""
    simulations = []
    for number, rank in enumerate(plan.ranks):
        simulation, orders = simulate_rank(rank.units, trees, rollouts, stages=options.pp, shape=shape)
        simulations.append(simulation)
        print(f"\ndata-parallel rank {number}: trees {', '.join(map(str, rank.trees)) or 'none'}")
        for stage, order in enumerate(orders):
            print(f"stage {stage}: {order}")
        print(ascii_timeline(simulation, options.width))
        state = max(simulation.peak_state_tokens)
        print(
            f"bubble {simulation.bubble_fraction:.1%}, peak state {state:,} tokens"
            + (
                f" ({-(-state // options.cp):,} on each of {options.cp} context-parallel ranks)"
                if options.cp > 1
                else ""
            )
        )
    print()
    return simulations


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        show(options)
    except (ValueError, OSError) as error:
        print(f"show_schedule: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
