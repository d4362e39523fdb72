"""One very long step on local ranks under context parallelism: that it ends, its time, bytes against the prediction.

Inputs: positions of the longest path (prompt and response), rollouts, a small model, keys of the configuration.
Outputs: a line for a person, and with --json FILE one more entry in the list `runs` of that file: arguments, seconds,
state bytes by kind on the rank with most (measured and predicted), peak resident bytes of that rank before and in the
step, FLOPs executed, and where it ran.

Time says little here: all ranks share the machine's cores. With --check_dense the gradient is also computed densely, in
the same layout, and the largest relative error over all parameters is added.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 256}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=524288, help="prompt and response (default %(default)s)")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response (default %(default)s)")
    parser.add_argument("--rollouts", type=int, default=4, help="tails of the tree (default %(default)s)")
    parser.add_argument("--gradient", choices=["exact", "detached"], default="exact")
    parser.add_argument("--cp", type=int, default=8, help="ranks, all context-parallel (default %(default)s)")
    parser.add_argument("--chunk_tokens", type=int, default=32768, help="tokens of a pass (default %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="model size (default %(default)s)")
    parser.add_argument("--check_dense", action="store_true", help="compare the gradient with a dense step")
    parser.add_argument("--timeout_s", type=float, default=7200.0, help="of the whole run (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to add the run to")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="more keys of the configuration")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """This rank's part of the step (collective)."""
    import torch
    import torch.distributed as dist

    from megatron_branch.config import make_config
    from megatron_branch.engine import host_cpu
    from megatron_branch.engine.architecture import architecture_from_config
    from megatron_branch.engine.checked import Checked
    from megatron_branch.engine.dump import untimed
    from megatron_branch.engine.groups import build_groups
    from megatron_branch.engine.outlook import fullest_rank
    from megatron_branch.engine.plain import PlainHost
    from megatron_branch.engine.random_model import random_source
    from megatron_branch.engine.worker import Worker
    from megatron_branch.plan.cost import plan_flops
    from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts

    device = host_cpu.enter()
    config = make_config(
        {
            "model": {"path": "random", "dtype": options.dtype},
            "data": {"rollouts": "synthetic"},
            "parallel": {"cp": options.cp},
            "branch": {"gradient": options.gradient, "chunk_tokens": options.chunk_tokens},
        },
        options.overrides,
    )
    source = random_source(**{name: getattr(options, name) for name in SIZES})
    checked = Checked(source, architecture_from_config(source.config, source="random"))
    groups = build_groups(dp=1, cp=options.cp, tp=1, pp=1, ulysses=config.parallel.ulysses)
    worker = Worker(config, checked, groups=groups, device=device, timers=untimed)
    host = PlainHost(worker.model, groups)
    spec = SyntheticSpec(
        prefix_tokens=(options.positions - options.response,),
        fan_out=(options.rollouts,),
        tail_tokens=(options.response,),
        vocab_size=options.vocab,
    )
    rollouts = list(synthetic_rollouts(spec))
    step = worker.plan(rollouts)
    before = _resident("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    with host.accumulate():
        worker.run(step)
    dist.barrier()
    predicted = fullest_rank(config, worker.arch, step.plan, device=device.type).count
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "state_bytes": dict(worker.runtime.store.count.peak),
        "predicted_state_bytes": dict(predicted.peak),
        "resident_before_bytes": before,
        "resident_peak_bytes": _resident("VmHWM"),
        "executed_flops": plan_flops(step.plan, step.trees, worker.arch.shape()).executed,
        "grad_norm": host.grad_norm(),
        "passes": len(step.order),
    }
    if options.check_dense:
        exact = {name: host.gradient(name, p).clone() for name, p in worker.model.named_parameters()}
        dense = worker.plan(rollouts, branch=config.branch.model_copy(update={"gradient": "dense"}))
        with host.accumulate():
            worker.run(dense)
        errors = [
            (torch.linalg.vector_norm(exact[name] - truth) / torch.linalg.vector_norm(truth)).item()
            for name, p in worker.model.named_parameters()
            for truth in [host.gradient(name, p)]
        ]
        result["error_against_dense"] = max(errors)
    return result


def _resident(key: str) -> int:
    """Bytes of this process by /proc/self/status (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {key}")


def main(arguments: Sequence[str]) -> int:
    """Run; 0 on success, 1 with one line on standard error for a wrong argument."""
    from megatron_branch.engine.local_ranks import run_local_ranks
    from tools.bench.facts import provenance

    options = parse(arguments)
    if options.positions <= options.response:
        print(f"length: --positions {options.positions} must exceed --response {options.response}", file=sys.stderr)
        return 1
    by_rank = run_local_ranks(options.cp, "tools.bench.length:measure", options, timeout_s=options.timeout_s)
    most = max(by_rank, key=lambda result: sum(result["state_bytes"].values()))
    kept = {key: value for key, value in vars(options).items() if key not in ("json", "timeout_s", "check_dense")}
    run = {"arguments": kept, **most, **provenance()}
    error = f", error against dense {most['error_against_dense']:.1e}" if "error_against_dense" in most else ""
    print(
        f"{options.gradient} at {options.positions:,} positions, cp {options.cp}: {most['seconds']:.0f} s, "
        f"{most['executed_flops'] / 1e12:.1f} TFLOP, state by kind {most['state_bytes']} bytes on the fullest rank "
        f"(predicted {most['predicted_state_bytes']}){error}"
    )
    if options.json is not None:
        runs = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
