"""Trees of rollouts in a training loop that is Megatron's: the user's model, wrappers, optimizer and loss function.

`adopt_spec` makes the layers compute branch passes, `adopt` their rotary positions; `make_planner` turns rollouts into
the `BranchStep` that the data iterator yields on every rank. `launch/megatron_loop.py` is such a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_branch.attention.backends import select_kernel
from megatron_branch.attention.config import AttentionConfig
from megatron_branch.engine.architecture import check_heads
from megatron_branch.engine.groups import Groups, megatron_groups
from megatron_branch.engine.planner import Planner
from megatron_branch.engine.room import room_of_each_rank
from megatron_branch.engine.rope import PositionRope
from megatron_branch.engine.runtime import Runtime, build_link, build_store
from megatron_branch.engine.sizes import stage_shapes
from megatron_branch.engine.spec import BranchLayer
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.plan.activations import Precision
from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.schedule.runner import Timers
from megatron_branch.state.config import StateConfig
from megatron_branch.state.predict import StateSizes, state_sizes

# Settings of TransformerConfig under which a branch pass computes what Megatron computes, and why not under others.
_DROPOUT = "one shared forward pass cannot draw a mask per rollout"
_ATTENTION = "branch attention is plain causal softmax attention"
_ONCE = "the passes of a step run and go backward in another order"
_ACTIVATIONS = "a pass is computed again from its stage input; BranchConfig.recompute_layers does it layer by layer"
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_dropout": ((0.0,), _DROPOUT),
    "attention_dropout": ((0.0,), _DROPOUT),
    "multi_latent_attention": ((False,), _ATTENTION),
    "experimental_attention_variant": ((None,), _ATTENTION),
    "window_size": ((None,), _ATTENTION),
    "softmax_type": (("vanilla",), _ATTENTION),
    "softmax_scale": ((None,), _ATTENTION),
    "apply_query_key_layer_scaling": ((False,), _ATTENTION),
    "attention_output_gate": ((False,), _ATTENTION),
    "qk_clip": ((False,), _ATTENTION),
    "log_max_attention_logit": ((False,), _ATTENTION),
    "no_rope_freq": ((None,), _ATTENTION),
    "num_moe_experts": ((None,), "routing of shared tokens is not kept between passes"),
    "mtp_num_layers": ((None, 0), "its heads predict across forks"),
    "recompute_granularity": ((None,), _ACTIVATIONS),
    "cpu_offloading": ((False,), _ONCE),
    "fine_grained_activation_offloading": ((False,), _ONCE),
    "defer_embedding_wgrad_compute": ((False,), _ONCE),
    "delay_wgrad_compute": ((False,), _ONCE),
    "cuda_graph_impl": (("none",), "passes have many lengths"),
    "tp_comm_overlap": ((False,), "passes have many lengths"),
    "fused_single_qkv_rope": ((False,), "Megatron's kernel takes no packed parameters, in which passes travel"),
    "enable_autocast": ((False,), "state is kept in the model's dtype"),
    "fp32_residual_connection": ((False,), "hidden states travel in the model's dtype"),
    "fp8": ((None,), "scales would be updated by passes that are run again"),
    "fp4": ((None,), "scales would be updated by passes that are run again"),
    "virtual_pipeline_model_parallel_size": ((None, 1), "a stage is one part of the model"),
}


def adopt(model: GPTModel) -> None:
    """Make a model whose layers come from `adopt_spec` compute branch passes; other batches are computed as before.

    Raises:
        ValueError: something in the model computes what a branch pass does not; the message names it.
    """
    _check_config(model.config)
    if model.position_embedding_type != "rope":
        raise ValueError(
            f"position_embedding_type={model.position_embedding_type!r} is not supported for trees of rollouts; use "
            "'rope'"
        )
    if not isinstance(model.rotary_pos_emb, PositionRope):
        model.rotary_pos_emb = PositionRope.of(model.rotary_pos_emb)
    check_adopted(model)


def check_adopted(model: nn.Module) -> None:
    """Raise ValueError unless `adopt_spec` and `adopt` have prepared the model (out of its wrappers)."""
    remedy = "build the model from adopt_spec(spec) and call adopt(model)"
    if not isinstance(model, GPTModel):
        raise ValueError(f"{type(model).__name__} does not compute trees of rollouts; use Megatron's GPTModel")
    for number, layer in enumerate(model.decoder.layers):
        if not isinstance(layer, BranchLayer):
            raise ValueError(
                f"layer {number} is a {type(layer).__name__}, which computes no trees of rollouts; {remedy}"
            )
    if not isinstance(getattr(model, "rotary_pos_emb", None), PositionRope):
        raise ValueError(f"the model's rotary positions are those of whole sequences; {remedy}")


def _check_config(config: TransformerConfig) -> None:
    for name, (allowed, why) in SUPPORTED.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            remedy = " or ".join(str(one) for one in allowed)
            raise ValueError(f"{name}={value} is not supported for trees of rollouts: {why}; set it to {remedy}")
    if config.num_query_groups < config.tensor_model_parallel_size:
        raise ValueError(
            f"num_query_groups={config.num_query_groups} with tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} is not supported for trees of rollouts: each rank needs KV heads of "
            "its own; lower the tensor-parallel size"
        )


def make_planner(
    model: nn.Module,
    *,
    branch: BranchConfig | None = None,
    objective: ObjectiveConfig | None = None,
    attention: AttentionConfig | None = None,
    state: StateConfig | None = None,
    ulysses: int = 1,
) -> Planner:
    """A planner of steps for this rank, over the groups that Megatron has made (collective).

    Args:
        model: this rank's stage, in wrappers or not.
        branch: chunks, packs and gradient mode; None: the defaults.
        objective: how tokens are weighted and advantages estimated; None: the defaults. Its loss settings are not read.
        attention: the kernels; None: the defaults.
        state: where state is kept; None: on the device.
        ulysses: size of the groups that exchange heads, a divisor of the context-parallel size; 1: none do.

    Raises:
        ValueError: the model or a setting is not supported here.
    """
    branch, objective, state = branch or BranchConfig(), objective or ObjectiveConfig(), state or StateConfig()
    gpt = get_attr_wrapped_model(model, "post_process", return_model_obj=True)
    check_adopted(gpt)
    if branch.activations == "auto":
        raise ValueError(
            "branch.activations=auto needs the bytes that a pass keeps, which are not known of this model; choose "
            "retain or recompute"
        )
    if objective.old_logprobs == "recompute":
        raise ValueError(
            "objective.old_logprobs=recompute is not supported here: give the rollouts log-probs (objective."
            "old_logprobs=file), or run a forward_only step and keep what your loss function computes"
        )
    cp = parallel_state.get_context_parallel_world_size()
    if ulysses < 1 or cp % ulysses:
        raise ValueError(f"ulysses={ulysses} does not divide the context-parallel size {cp}; choose a divisor")
    tp = parallel_state.get_tensor_model_parallel_world_size()
    check_heads(gpt.config.num_attention_heads, gpt.config.num_query_groups, tp=tp, ulysses=ulysses)
    config, groups = gpt.config, megatron_groups(ulysses=ulysses)
    parameter, shape, sequence = next(gpt.parameters()), _shape(gpt), config.sequence_parallel
    sizes = _sizes(gpt, groups, shape, ulysses)
    runtime = Runtime(
        groups=groups,
        kernel=select_kernel((attention or AttentionConfig()).backend, device=parameter.device, dtype=parameter.dtype),
        link=build_link(groups, dtype=parameter.dtype, device=parameter.device, hidden=config.hidden_size),
        store=build_store(groups, state, device=parameter.device, sequence_parallel=sequence),
        timers=_timers(config),
        activations=sizes[groups.pp.rank].activations,
    )
    return Planner(
        runtime=runtime,
        shape=shape,
        sizes=sizes,
        branch=branch,
        objective=objective,
        state=state,
        ulysses=ulysses,
        sequence_parallel=groups.tp.size if sequence else 1,
        host_room_bytes=room_of_each_rank(state),
    )


def _shape(model: GPTModel) -> ModelShape:
    config = model.config
    return ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab=model.vocab_size,
    )


def _sizes(model: GPTModel, groups: Groups, shape: ModelShape, ulysses: int) -> list[StateSizes]:
    """Bytes per token of each stage (collective). Those of retained graphs are of local layers and this package's head:
    another model keeps other tensors, and nothing is decided by them here.
    """
    layers: list[int] = [0] * groups.pp.size
    dist.all_gather_object(layers, len(model.decoder.layers), group=groups.pp.group)
    parameter = next(model.parameters())
    precision = Precision(parameter.element_size(), fused_norms=parameter.device.type != "cpu")
    sequence = groups.tp.size if model.config.sequence_parallel else 1
    stages = stage_shapes(layers, tp=groups.tp.size, cp=groups.cp.size, ulysses=ulysses, sequence=sequence)
    return [state_sizes(shape, stage, precision, qk_norm=model.config.qk_layernorm) for stage in stages]


def _timers(config: TransformerConfig) -> Timers:
    """Megatron's timers of the run, if it has any, as `branch-capture` and so on."""

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        if config.timers is None:
            yield
            return
        timer = config.timers(f"branch-{phase}", log_level=2)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    return timed
