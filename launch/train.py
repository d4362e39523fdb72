"""Train on trees of rollouts; started by the deepspeed launcher (or torchrun), one process per device.

    deepspeed --num_gpus 8 launch/train.py --config C.yaml [--deepspeed_config D.json] [key.sub=value ...]

Inputs: a YAML configuration, a Hugging Face folder and a rollouts file, both named in it.
Outputs, under tracking.run_dir: metrics.jsonl, the W&B run, checkpoints/, Hugging Face exports, pictures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

from megatron_branch.config import Config, load_config
from megatron_branch.engine.deepspeed_config import with_deepspeed_file
from megatron_branch.engine.quiet import silence_missing_accelerators


class Parser(argparse.ArgumentParser):
    """Reports like any other fault: once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(f"{message}; see --help")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML configuration")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON, passed through; keys that cannot hold are refused")
    parser.add_argument("--local_rank", type=int, default=None, help="given by launchers; the environment decides")
    parser.add_argument("--dry_run", action="store_true", help="print statistics, schedule and bytes, and exit")
    parser.add_argument("--world_size", type=int, help="ranks that a dry run plans for (default: all it needs)")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="configuration keys")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Run; 0 on success, 1 after one clear message: what to put right, or where it failed; 143 after a signal."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    silence_missing_accelerators()
    try:
        options = parse(arguments)
        config, content = with_deepspeed_file(load_config(options.config, options.overrides), options.deepspeed_config)
        if options.dry_run:
            from megatron_branch.engine.dry_run import dry_run

            print(dry_run(config, world_size=options.world_size))
            return 0
        if options.world_size is not None:
            raise ValueError(f"--world_size={options.world_size} belongs to --dry_run; the launcher sets a run's ranks")
        from megatron_branch.engine.checked import check_run

        checked, data = check_run(config, world_size=world_size)
        return train(config, content, checked, data)
    except ValueError as error:
        return refuse(error, rank)
    except Exception as error:
        traceback.print_exception(error)
        print(f"train.py: rank {rank}: start: {error}", file=sys.stderr, flush=True)
        return 1


def refuse(error: ValueError, rank: int) -> int:
    """One message from rank 0; another rank speaks only if rank 0 found nothing wrong and the job goes on."""
    if rank != 0:
        time.sleep(15.0)
    print(f"train.py: {'' if rank == 0 else f'rank {rank}: '}{error}", file=sys.stderr, flush=True)
    return 1


def train(config: Config, content: dict[str, Any], checked: Any, data: Any) -> int:
    """Everything that needs torch.distributed; 143 if a signal ended it early."""
    import torch
    import torch.distributed as dist

    from megatron_branch.engine import host_cpu
    from megatron_branch.engine.groups import LONGEST_WAIT, build_groups
    from megatron_branch.engine.room import check_room
    from megatron_branch.engine.trainer import Trainer
    from megatron_branch.engine.watchdog import Watchdog, shared_store

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = host_cpu.enter()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's name
    world = int(os.environ["WORLD_SIZE"])
    check_room(config, checked.arch, data.steps, device=device.type, world_size=world, ranks_here=here)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=config.timeout_s)))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LONGEST_WAIT)
    sizes = config.parallel
    dp = sizes.data_parallel(dist.get_world_size())
    shared = shared_store(os.environ["MASTER_ADDR"])
    with Watchdog(shared, rank=rank, world_size=world, timeout_s=config.timeout_s) as watchdog:
        try:
            groups = build_groups(
                dp=dp, cp=sizes.cp, tp=sizes.tp, pp=sizes.pp, ulysses=sizes.ulysses, wait=LONGEST_WAIT
            )
            trainer = Trainer(config, checked, groups=groups, device=device, deepspeed_content=content)
            stopped = trainer.train(data.steps, read_s=data.read_s, left_out=data.left_out, watchdog=watchdog)
        except Exception as error:
            watchdog.report(error)
            raise SystemExit(1) from None
    dist.barrier()  # rank 0 serves the others' store until they are done with it
    dist.destroy_process_group()  # not after an error: that would wait for ranks that are gone, and before it is said
    return 143 if stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
