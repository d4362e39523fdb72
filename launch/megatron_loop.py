"""A training loop as Megatron users write them: some steps are trees of rollouts, others ordinary batches.

    deepspeed --num_accelerators 2 launch/megatron_loop.py --pp 2        (DS_ACCELERATOR=cpu where there is no GPU)
    torchrun --nproc_per_node 2 launch/megatron_loop.py --tp 2

Inputs: none; a small random model and synthetic rollouts (`rollouts.reader` reads files). Output: a line per step.
Nothing of this package's trainer is used. What trees need is marked `# trees`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_branch import adopt, adopt_spec, get_forward_backward_func, make_planner  # trees: one import replaced
from megatron_branch.engine import host_cpu
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts

VOCAB, LENGTH, MICROBATCHES, CLIP = 128, 64, 4, 0.2


def policy_loss(batch: dict[str, Any], losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Clipped policy gradient over the entries of a pass; `weight` has the denominator of the whole step in it."""
    logp = -losses[0][batch["entry_offset"]]
    old = torch.where(batch["old_logprobs"].isnan(), logp.detach(), batch["old_logprobs"])
    ratio, advantage = (logp - old).exp(), batch["advantage"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    loss = -(batch["weight"] * surrogate).sum()
    return loss, {"loss": loss.item()}


def language_model_loss(batch: dict[str, Any], losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean over the trained tokens of a microbatch."""
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    return loss, {"loss": loss.item() / MICROBATCHES}


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's; for a pass of a tree the batch also has `packed_seq_params`."""
    batch = next(data_iterator)
    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    losses = model(*inputs, labels=batch["labels"], packed_seq_params=batch.get("packed_seq_params"))  # trees
    return losses, partial(policy_loss if "weight" in batch else language_model_loss, batch)


def ordinary_batches(device: torch.device) -> Iterator[dict[str, Any]]:
    """Random text, another one on each data-parallel rank."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        ids = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=generator).to(device)
        positions = torch.arange(LENGTH, device=device)[None]
        batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}
        yield batch | {"loss_mask": torch.ones(1, LENGTH, device=device), "attention_mask": None}


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """The model in Megatron's wrappers, and Megatron's optimizer."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        hidden_dropout=0.0,  # trees: one forward pass of a prompt cannot draw a mask per rollout
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
    )
    model: Any = GPTModel(
        config,
        adopt_spec(get_gpt_layer_local_spec()),  # trees
        vocab_size=VOCAB,
        max_sequence_length=4096,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    adopt(model)  # trees
    if config.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)  # sums over many passes
    model = DistributedDataParallel(config, ddp, model)
    clip = 1.0 if device.type == "cuda" else 0.0  # Megatron's clipping insists on CUDA tensors
    settings = OptimizerConfig(lr=1e-3, bf16=config.bf16, clip_grad=clip)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.no_sync_func, config.finalize_model_grads_func = model.no_sync, finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def main() -> None:
    """Train; every other step on trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tp": 1, "pp": 1, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--local_rank", type=int, help="given by launchers; the environment decides")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = host_cpu.enter()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(options.tp, options.pp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = build(options, device)
    planner = make_planner(model)  # trees
    rollouts = synthetic_rollouts(SyntheticSpec(prefix_tokens=(48,), groups=2, vocab_size=VOCAB, logprobs=True))
    for step in range(options.steps):
        trees = step % 2 == 0
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([planner.step(rollouts)]) if trees else ordinary_batches(device),  # trees
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        optimizer.step()
        loss = torch.tensor(sum(one["loss"] for one in losses), device=device)
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step + 1} | {'trees' if trees else 'ordinary'} | loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
