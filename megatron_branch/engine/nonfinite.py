"""Which rollouts can have made a step's gradient not finite."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist

from megatron_branch.engine.planner import PlannedStep
from megatron_branch.engine.worker import Reports, Worker
from megatron_branch.rollouts.record import Rollout

SHOWN = 5
LARGEST = math.log(torch.finfo(torch.float32).max)  # of a difference of log-probs whose ratio is finite


def suspects(worker: Worker, step: PlannedStep, reports: Reports) -> str:
    """The rollouts of a step whose log-probs are not finite, or so far apart that a ratio overflows, with where they
    stand (collective; the same text on every rank).
    """
    every = worker.logprobs(step, reports)
    text: list[str] = [""]
    if every is not None:
        found = [
            f"{rollout.rollout_id} ({', '.join(part for part in (rollout.source, why) if part)})"
            for rollout, own in zip(step.rollouts, every, strict=True)
            if (why := _fault(rollout, np.array(own)))
        ]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        text = [f"rollouts: {', '.join(found[:SHOWN])}{more}" if found else "no single rollout's log-probs show why"]
    dist.broadcast_object_list(text)
    return text[0]


def _fault(rollout: Rollout, own: np.ndarray) -> str:
    """What is wrong with the log-probs of one rollout's trained tokens; empty if nothing."""
    if not np.isfinite(own).all():
        return "its log-probs are not finite"
    for name, given in (("logprobs", rollout.logprobs), ("ref_logprobs", rollout.ref_logprobs)):
        if given is not None and own.size:
            gap = float(np.abs(own - given[rollout.loss_mask]).max())
            if gap > LARGEST:
                return f"its {name} are up to {gap:.4g} from the model's: a ratio overflows"
    return ""
