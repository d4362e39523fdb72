"""A training step as a Megatron user writes it: Megatron's model, wrapper, schedules, finalisation and optimizer.

Trees and ordinary batches take one forward step and one loss function; only what the data iterator yields differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_branch import adopt, adopt_spec, get_forward_backward_func, make_planner
from megatron_branch.config import make_config
from megatron_branch.engine import host_cpu
from megatron_branch.engine.architecture import stage_layers
from megatron_branch.engine.checked import Checked, check_model
from megatron_branch.engine.convert import gather_full, load_weights
from megatron_branch.engine.groups import Groups, build_groups
from megatron_branch.engine.model_config import transformer_config
from megatron_branch.engine.spec import BranchNorm
from megatron_branch.engine.tensor_layout import model_entries
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.weights import row_weights
from megatron_branch.rollouts.record import Rollout
from tests.worlds import leave_layout

CLIP = 0.2


@dataclass(frozen=True)
class LoopCase:
    """How a user trains.

    Attributes:
        model: a Hugging Face folder whose weights are loaded.
        layout: `(tp, cp, pp, dp)`.
        trees: the data iterator yields a `BranchStep`; otherwise each rollout is a microbatch.
        per_token: the loss function returns a sum and a number of tokens.
        shares_per_token: the setting that goes with it is on, and the loss function returns shares all the same.
        overlap: Megatron's `overlap_grad_reduce`, in small buckets; an ordinary step comes before.
        sequence_parallel, ulysses: of the model.
        branch: how trees are computed.
        loss_scale: of `grad_scale_func`.
        forward_only: evaluate.
        adopted: the layers are ours.
        rounded_logits: Megatron's cross entropy rounds them to float32, as it always does; otherwise it keeps float64.
        dtype: of the model.
        optimizer: Megatron's plain one, its distributed one, or none; `clip_grad` is its.
        error_first: the loss function raises at its third call, and the step is run again.
    """

    model: Path
    layout: tuple[int, int, int, int] = (1, 1, 1, 1)
    trees: bool = True
    per_token: bool = False
    shares_per_token: bool = False
    overlap: bool = False
    sequence_parallel: bool = False
    ulysses: int = 1
    branch: BranchConfig = BranchConfig(chunk_tokens=7, pack_tokens=24, gate=False)
    loss_scale: float = 1.0
    forward_only: bool = False
    adopted: bool = True
    rounded_logits: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: Literal["plain", "distributed"] | None = "plain"
    clip_grad: float = 0.0
    error_first: bool = False


@dataclass
class Outcome:
    """Gradients and weights whole on global rank 0, the rest on every rank.

    Attributes:
        gradients, weights: by Hugging Face name; the latter after a step of Megatron's optimizer.
        loss: sum of what the loss function reported, over all ranks.
        reports: what the schedule returned on this rank.
        replicas_agree: all ranks that hold a parameter have the same gradient, to the last bit.
        finalised: how often gradients were finalised.
        timed: names of Megatron's timers that were started; all were stopped.
        heads: how often logits were computed.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    reports: list[Any] = field(default_factory=list)
    replicas_agree: bool = True
    finalised: int = 0
    timed: set[str] = field(default_factory=set)
    heads: int = 0


def policy_loss(batch: dict[str, Any], per_token: bool, scale: float, losses: Tensor) -> tuple[Any, ...]:
    """Clipped policy gradient as a user may write it, from Megatron's per-token losses `[1, t]`."""
    logp = -losses[0][batch["entry_offset"]]
    old = torch.where(batch["old_logprobs"].isnan(), logp.detach(), batch["old_logprobs"])
    ratio, advantage = (logp - old).exp(), batch["advantage"]
    each = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    if per_token:
        loss = each.sum()
        return loss, batch["loss_mask"].sum().int(), {"loss": loss.item()}
    loss = (batch["weight"] * each).sum()
    return loss * scale, {"loss": loss.item()}


def forward_step(per_token: bool, scale: float, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Megatron's signature once the first two are bound; `scale` undoes what Megatron's schedules multiply by."""
    batch = next(data_iterator)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return losses, partial(policy_loss, batch, per_token, scale)


def microbatch(rollout: Rollout, weight: float, device: torch.device) -> dict[str, Any]:
    """A rollout alone, with the keys of a pass."""
    ids, mask = torch.from_numpy(rollout.token_ids.copy()), torch.from_numpy(rollout.loss_mask.copy())
    trained = mask.nonzero()[:, 0]
    nothing = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    old = nothing if rollout.logprobs is None else torch.from_numpy(rollout.logprobs.copy())
    assert rollout.advantage is not None
    batch = {
        "tokens": ids[None, :-1],
        "position_ids": torch.arange(len(ids) - 1)[None],
        "attention_mask": None,
        "labels": ids[None, 1:],
        "loss_mask": mask[None, 1:].float(),
        "packed_seq_params": None,
        "entry_offset": trained - 1,
        "weight": torch.full((len(trained),), weight, dtype=torch.float64),
        "advantage": torch.from_numpy(rollout.advantage.copy())[trained],
        "old_logprobs": old[trained],
    }
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


@dataclass
class Stopwatches:
    """Stands in for Megatron's timers; like them it refuses to start one twice."""

    running: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        def start(barrier: bool = False) -> None:
            assert name not in self.running, f"{name} has already been started"
            self.running.add(name)
            self.names.add(name)

        return SimpleNamespace(start=start, stop=lambda barrier=False: self.running.remove(name))


@dataclass
class Parts:
    """What a user's script has built."""

    checked: Checked
    groups: Groups
    config: TransformerConfig
    gpt: GPTModel
    model: DistributedDataParallel
    finalised: list[int] = field(default_factory=list)
    timers: Stopwatches = field(default_factory=Stopwatches)
    heads: list[int] = field(default_factory=list)


def build(case: LoopCase) -> Parts:
    """The set-up of a user's script."""
    tp, cp, pp, dp = case.layout
    device = host_cpu.enter()
    groups = build_groups(dp=dp, cp=cp, tp=tp, pp=pp)
    checked = check_model(make_config({"model": {"path": str(case.model)}, "data": {"rollouts": "unused"}}))
    arch = checked.arch
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(arch, groups, case.dtype, sequence_parallel=case.sequence_parallel)
    config.calculate_per_token_loss = case.per_token or case.shares_per_token
    config.variable_seq_lengths = True
    if case.loss_scale != 1.0:
        config.grad_scale_func = lambda loss: loss * case.loss_scale
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    if case.sequence_parallel:  # Megatron's wrapper of torch norms refuses it
        inner = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = BranchNorm
        inner.q_layernorm = inner.k_layernorm = BranchNorm
        layers = stage_layers(arch, pp)[groups.pp.rank]
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=BranchNorm)
    gpt = GPTModel(
        config,
        adopt_spec(spec) if case.adopted else spec,
        vocab_size=arch.padded_vocab(tp),
        max_sequence_length=arch.max_positions,
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        position_embedding_type="rope",
        rotary_base=int(arch.rope.theta),
        share_embeddings_and_output_weights=arch.tied,
    )
    if case.adopted:
        adopt(gpt)
    gpt.to(device=device, dtype=case.dtype)
    load_weights(gpt, checked.source, arch, groups)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.dtype is torch.bfloat16,
        overlap_grad_reduce=case.overlap,
        bucket_size=4000 if case.overlap else None,
        use_distributed_optimizer=case.optimizer == "distributed",
    )
    model = DistributedDataParallel(config, options, gpt)
    parts = Parts(checked, groups, config, gpt, model)

    def finalise(*args: Any, **options: Any) -> None:
        parts.finalised.append(1)
        finalize_model_grads(*args, **options)

    config.finalize_model_grads_func = finalise
    config.timers = parts.timers
    if groups.last_stage:
        gpt.output_layer.register_forward_hook(lambda *_: parts.heads.append(1))
    if case.overlap:
        config.no_sync_func = model.no_sync
    return parts


def whole_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For `VocabParallelCrossEntropy.calculate_logits_max`, which rounds logits to float32."""
    return logits.clone(), logits.amax(-1)


def one_step(case: LoopCase, rollouts: Sequence[Rollout]) -> Outcome:
    """Build, run one step, and gather (collective)."""
    parts = build(case)
    precise = patch.object(VocabParallelCrossEntropy, "calculate_logits_max", staticmethod(whole_logits))
    try:
        with nullcontext() if case.rounded_logits else precise:
            return _one_step(case, parts, list(rollouts))
    finally:
        leave_layout()


def _one_step(case: LoopCase, parts: Parts, rollouts: list[Rollout]) -> Outcome:
    run = get_forward_backward_func()
    if case.overlap:
        _ordinary(case, parts, rollouts[:2], run)
    step = _tree_step(case, parts, rollouts) if case.trees else partial(_ordinary, case, parts, rollouts)
    if case.error_first:
        with pytest.raises(ZeroDivisionError), patch(f"{__name__}.policy_loss", _raises_at_the_third_call()):
            step(run)
    parts.finalised.clear()
    parts.heads.clear()
    parts.model.zero_grad_buffer()
    optimizer = _optimizer(case, parts)
    reports = step(run)
    outcome = Outcome(reports=reports, replicas_agree=_replicas_agree(parts), finalised=len(parts.finalised))
    outcome.gradients = _whole(parts, lambda _, parameter: parameter.main_grad)
    if optimizer is not None:
        optimizer.step()
    outcome.weights = _whole(parts, lambda _, parameter: parameter)
    loss = torch.tensor(sum(report["loss"] for report in reports), dtype=torch.float64)
    loss = loss.to(next(parts.gpt.parameters()).device)
    for group in (parts.groups.dp_cp.group, parts.groups.pp.group):
        dist.all_reduce(loss, group=group)
    outcome.loss = loss.item()
    assert not parts.timers.running
    outcome.timed, outcome.heads = parts.timers.names, len(parts.heads)
    return outcome


def _tree_step(case: LoopCase, parts: Parts, rollouts: list[Rollout]) -> Callable[[Any], list[Any]]:
    planner = make_planner(parts.model, branch=case.branch, ulysses=case.ulysses)
    return lambda run: run(
        forward_step_func=partial(forward_step, case.per_token, 1.0),
        data_iterator=iter((planner.step(rollouts),)),
        model=[parts.model],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=case.forward_only,
    )


def _optimizer(case: LoopCase, parts: Parts) -> Any:
    if case.optimizer is None:
        return None
    options = OptimizerConfig(
        optimizer="sgd",
        lr=0.1,
        weight_decay=0.0,
        clip_grad=case.clip_grad,
        bf16=case.dtype is torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=case.optimizer == "distributed",
    )
    optimizer = get_megatron_optimizer(options, [parts.model], use_gloo_process_groups=False)
    optimizer.zero_grad()
    return optimizer


def _raises_at_the_third_call() -> Callable[..., Any]:
    original, calls = policy_loss, iter(range(1, 100))

    def loss(*args: Any) -> Any:
        if next(calls) == 3:
            raise ZeroDivisionError
        return original(*args)

    return loss


def _ordinary(case: LoopCase, parts: Parts, rollouts: list[Rollout], run: Callable[..., Any]) -> list[Any]:
    """Every rollout a microbatch, in Megatron's own schedule."""
    weights = row_weights(rollouts, "token-mean")
    device = next(parts.gpt.parameters()).device
    batches = [microbatch(rollout, weight, device) for rollout, weight in zip(rollouts, weights, strict=True)]
    return run(
        forward_step_func=partial(forward_step, case.per_token, float(len(batches))),
        data_iterator=iter(batches),
        model=[parts.model],
        num_microbatches=len(batches),
        seq_length=max(len(rollout) for rollout in rollouts) - 1,
        micro_batch_size=1,
        forward_only=case.forward_only,
    )


def _whole(parts: Parts, tensor_of: Callable[[str, Any], Tensor]) -> dict[str, Tensor]:
    return dict(gather_full(parts.gpt, parts.checked.arch, parts.groups, tensor_of, dtype=torch.float64))


def _replicas_agree(parts: Parts) -> bool:
    """Whether copies of a parameter's gradient agree: over data-parallel ranks, tensor-parallel ones, tied stages."""
    groups, agree = parts.groups, True
    for entry in model_entries(parts.checked.arch, groups.pp.size):
        if entry.stage != groups.pp.rank:
            continue
        gradient = dict(parts.gpt.named_parameters())[entry.megatron].main_grad
        holders = [groups.dp_cp.group] + ([groups.tp.group] if entry.kind == "replicated" else [])
        tied = parts.checked.arch.tied and groups.embedding is not None and entry.kind == "vocab"
        for group in [*holders, *([groups.embedding.group] if tied and groups.embedding else [])]:
            first = gradient.clone()
            dist.broadcast(first, src=dist.get_process_group_ranks(group)[0], group=group)
            agree &= torch.equal(first, gradient)
    return agree
