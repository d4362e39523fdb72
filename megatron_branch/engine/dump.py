"""One step without the optimizer, written down: the ranks' part of `tools/dump_step.py`."""

from __future__ import annotations

import json
import os
import resource
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_branch.config import Config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.convert import gather_full
from megatron_branch.engine.forward_step import total
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.model_config import DTYPES
from megatron_branch.engine.plain import PlainHost
from megatron_branch.engine.planner import PlannedStep
from megatron_branch.engine.worker import Reports, Worker
from megatron_branch.objective.reduce import reduce_losses
from megatron_branch.rollouts.reader import read_rollouts


def dump_step(config: Config, out: str, through_deepspeed: bool) -> None:
    """Compute one step over all rows of the file and write gradients and what belongs to them (collective)."""
    device = host_cpu.enter()
    sizes = config.parallel
    dp = sizes.data_parallel(dist.get_world_size())
    groups = build_groups(dp=dp, cp=sizes.cp, tp=sizes.tp, pp=sizes.pp, ulysses=sizes.ulysses)
    checked = check_model(config)
    rollouts = list(read_rollouts(config.data.rollouts, vocab_size=checked.arch.vocab))
    worker = Worker(config, checked, groups=groups, device=device, timers=untimed)
    host: Any
    if through_deepspeed:
        from megatron_branch.engine.deepspeed_host import DeepSpeedHost

        host = DeepSpeedHost(worker.model, config, groups, store=worker.runtime.store, timers=untimed)
    else:
        host = PlainHost(worker.model, groups)
    worker.runtime.loss_scale = host.loss_scale
    step = worker.plan(rollouts)
    if config.objective.old_logprobs == "recompute":
        worker.score(step)
    with host.accumulate():
        reports = worker.run(step)
    dtype = torch.float32 if config.model.dtype == "bfloat16" else DTYPES[config.model.dtype]
    tensors = dict(gather_full(worker.model, worker.arch, groups, host.gradient, dtype=dtype))
    facts = _facts(worker, step, reports, host)
    if dist.get_rank() == 0:
        _write(Path(out), {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, facts)


def untimed(phase: str) -> AbstractContextManager[None]:
    """Timers that do not time."""
    return nullcontext()


def peak_process_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _facts(worker: Worker, step: PlannedStep, reports: Reports, host: Any) -> dict[str, Any]:
    groups = worker.groups
    sums = reduce_losses(total(reports, worker.device), [groups.dp_cp.group, groups.pp.group])
    kinds = worker.runtime.store.count.peak
    largest = torch.tensor([*kinds.values(), peak_process_bytes()], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    *by_kind, process = largest.tolist()
    return {
        "loss": sums.loss.item(),
        "grad_norm": host.grad_norm(),
        "trained_tokens": step.plan.trained_tokens,
        "logprobs": worker.logprobs(step, reports),
        "tokens": {
            "logical": step.plan.logical_tokens,
            "executed": step.plan.executed_tokens,
            "loss": step.plan.loss_tokens,
        },
        "max_abs_log_ratio": sums.max_log_ratio.item(),
        "state_bytes": dict(zip(kinds, by_kind, strict=True)),
        "peak_bytes": process,
    }


def _write(target: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Both files under temporary names first, so that neither is ever half-written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    save_file(tensors, partial)
    os.replace(partial, target)
    beside = target.with_name(f"{target.name}.json")
    partial = beside.with_name(f".{beside.name}.partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, beside)
