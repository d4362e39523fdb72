"""The step as plain Hugging Face autograd computes it: every rollout alone, objective and detached mode written again.

Nothing of the package is used but the rollout record, so an error there cannot hide here. Everything in float64, but
that Hugging Face casts the input of its norms to float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from megatron_branch.rollouts.record import Rollout

ATTENTION = "parity_constant_prefix"
DEFAULTS: dict[str, Any] = {
    "advantage": "grpo",
    "aggregation": "token-mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "entropy_coefficient": 0.0,
    "temperature": 1.0,
    "old_logprobs": "file",
}


@dataclass(frozen=True)
class Reference:
    """Gradients by name, log-probs of each rollout's trained tokens, the loss."""

    gradients: dict[str, Tensor]
    logprobs: list[list[float]]
    loss: float


def reference(
    folder: Path,
    rollouts: Sequence[Rollout],
    *,
    detached: bool = False,
    float32_norms: bool = False,
    objective: dict[str, Any] | None = None,
) -> Reference:
    """One step: GRPO, token-mean, clip 0.2 on both sides, old log-prob = the current one where the file has none.

    Args:
        folder: Hugging Face folder.
        rollouts: the step.
        detached: keys and values of the constant leading positions of each rollout (see `constant_positions`) are
            detached in every layer.
        float32_norms: leave Hugging Face's norms as they are; otherwise they are written out in float64.
        objective: other settings than `DEFAULTS`, by the names of the configuration.
    """
    model = load(folder, float32_norms=float32_norms)
    return backward(model, rollouts, detached=detached, objective=objective)


def load(folder: Path, *, float32_norms: bool = False) -> nn.Module:
    """The model in float64, with the attention below."""
    AttentionInterface.register(ATTENTION, _attention)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=ATTENTION)
    model = model.double().eval()
    for module in () if float32_norms else model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def backward(
    model: nn.Module, rollouts: Sequence[Rollout], *, detached: bool = False, objective: dict[str, Any] | None = None
) -> Reference:
    """Add the step's gradients into the model's `.grad`; see `reference`."""
    settings = DEFAULTS | (objective or {})
    advantages = group_advantages(rollouts, settings["advantage"])
    counts = [int(rollout.loss_mask.sum()) for rollout in rollouts]
    sequences = sum(count > 0 for count in counts)
    logprobs: list[list[float]] = []
    loss = 0.0
    for index, rollout in enumerate(rollouts):
        places = np.flatnonzero(rollout.loss_mask)
        if not len(places):
            logprobs.append([])
            continue
        constant = constant_positions(index, rollouts) if detached else 0
        ids = torch.from_numpy(rollout.token_ids.copy())[None]
        logits = model(ids, use_cache=False, constant=constant).logits[0] / settings["temperature"]
        every = logits.log_softmax(-1)[torch.from_numpy(places - 1)]
        logp = every.gather(1, torch.from_numpy(rollout.token_ids[places])[:, None])[:, 0]
        advantage = torch.from_numpy(advantages[index][places])
        terms = _token_losses(every, logp, advantage, rollout, places, settings)
        mean = {"token-mean": sum(counts), "seq-mean-token-sum": sequences}
        part = terms.sum() / mean.get(settings["aggregation"], sequences * counts[index])
        part.backward()
        loss += part.item()
        logprobs.append(logp.tolist())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return Reference(gradients, logprobs, loss)


def _token_losses(
    every: Tensor, logp: Tensor, advantage: Tensor, rollout: Rollout, places: np.ndarray, settings: dict[str, Any]
) -> Tensor:
    """Loss of each trained token; `every` are the log-probs of the whole vocabulary there."""
    old = logp.detach()
    if rollout.logprobs is not None and settings["old_logprobs"] == "file":
        old = torch.from_numpy(rollout.logprobs[places])
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
    terms = -torch.minimum(ratio * advantage, clipped * advantage)
    if settings["kl_coefficient"]:
        assert rollout.ref_logprobs is not None
        distance = logp - torch.from_numpy(rollout.ref_logprobs[places])
        kl = {"k1": distance, "k2": distance**2 / 2, "k3": (-distance).exp() - 1 + distance}[settings["kl_estimator"]]
        terms = terms + settings["kl_coefficient"] * kl
    return terms + settings["entropy_coefficient"] * (every.exp() * every).sum(-1)


def group_advantages(rollouts: Sequence[Rollout], estimator: str) -> list[np.ndarray]:
    """The file's; else over the group, 0 for a group of one:

    grpo: (reward - mean) / (std + 1e-6), n - 1 in std; grpo_no_std: reward - mean; rloo: reward - mean of the others.
    """
    groups = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout.reward)
    result = []
    for rollout in rollouts:
        rewards, value = np.array(groups[rollout.group_id]), 0.0
        if len(rewards) > 1 and estimator == "rloo":
            value = rollout.reward - (rewards.sum() - rollout.reward) / (len(rewards) - 1)
        elif len(rewards) > 1:
            value = rollout.reward - rewards.mean()
            value /= rewards.std(ddof=1) + 1e-6 if estimator == "grpo" else 1.0
        result.append(np.full(len(rollout), value) if rollout.advantage is None else rollout.advantage)
    return result


def constant_positions(index: int, rollouts: Sequence[Rollout]) -> int:
    """How many leading inputs of a rollout are constant in detached mode, by brute force.

    The input at position p is shared by the rollouts with the same tokens 0 .. p + 1. It is constant when none of those
    that share tokens 0 .. t trains token t, for all t <= p + 1.
    """
    ids = rollouts[index].token_ids
    for t in range(1, len(ids)):
        sharing = [o for o in rollouts if len(o) > t and np.array_equal(o.token_ids[: t + 1], ids[: t + 1])]
        if any(other.loss_mask[t] for other in sharing):
            return t - 1
    return len(ids) - 1


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    constant: int = 0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention written out; `[1, heads, T, D]` in, `[1, T, heads, D]` out."""
    key, value = (torch.cat([x[:, :, :constant].detach(), x[:, :, constant:]], 2) for x in (key, value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(1, 2), None
