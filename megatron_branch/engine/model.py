"""The model of one pipeline stage: Megatron's GPTModel with branch attention and a head that returns log-probs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_branch.engine.adopt import adopt
from megatron_branch.engine.architecture import Architecture, stage_layers
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.model_config import transformer_config
from megatron_branch.engine.rope import inverse_frequencies
from megatron_branch.engine.spec import BranchParams, branch_block_spec
from megatron_branch.engine.tensor_layout import model_entries
from megatron_branch.objective.logprobs import HeadSettings, token_scores


class LogProbHead(nn.Module):
    """Log-probs of a pass's targets; a module of its own so that a host that gathers weights by module can."""

    def __init__(self, settings: HeadSettings, tp_group: torch.distributed.ProcessGroup | None) -> None:
        super().__init__()
        self.settings, self.tp_group = settings, tp_group

    def forward(self, hidden_nE: Tensor, weight: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs `[n]` and, where the settings ask for it, entropies `[n]`, in nats."""
        scores = token_scores(hidden_nE, weight, targets_n, settings=self.settings, tp_group=self.tp_group)
        return scores.logp_T, scores.entropy_T


class BranchGPTModel(GPTModel):
    """GPTModel whose last stage returns `(logp [n], entropy [n] or None)` at the pass's head rows.

    It returns the hidden states `[t, 1, hidden]` on other stages, and of a pass without loss; with sequence parallelism
    this rank's share of them.
    """

    head: LogProbHead

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: BranchParams, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        rows = packed_seq_params.pass_descriptor.head
        assert rows is not None, "a pass without loss has no postprocessing"
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        if self.config.sequence_parallel:
            # The head adds up its gradient over tensor-parallel ranks itself; each then takes its tokens.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return self.head(hidden_states[rows.offsets, 0], weight, rows.targets)


def build_model(
    arch: Architecture,
    groups: Groups,
    *,
    dtype: torch.dtype,
    head: HeadSettings,
    device: torch.device,
    sequence_parallel: bool = False,
) -> BranchGPTModel:
    """This rank's shard of the model, weights not yet loaded.

    Args:
        arch: what to build.
        groups: the axes; the layers of stage `groups.pp.rank` are built, split over `groups.tp`.
        dtype: float64, float32 or bfloat16.
        head: how logits become log-probs.
        device: where the weights live.
        sequence_parallel: between layers each tensor-parallel rank has its share of the tokens only.
    """
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(arch, groups, dtype, sequence_parallel=sequence_parallel)
    model = BranchGPTModel(
        config,
        branch_block_spec(config, stage_layers(arch, groups.pp.size)[groups.pp.rank]),
        vocab_size=arch.padded_vocab(groups.tp.size),
        max_sequence_length=arch.max_positions,
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=arch.tied,
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rope, arch.head_dim)[0]
    adopt(model)
    model.head = LogProbHead(head, groups.tp.group if groups.tp.size > 1 else None)
    model = model.to(device=device, dtype=dtype)
    _mark(model, arch, groups)
    return model


def _mark(model: BranchGPTModel, arch: Architecture, groups: Groups) -> None:
    """Note on each parameter how it is held, for norms and reductions: Megatron leaves uninitialised ones unmarked.

    `tensor_model_parallel`: this rank has a shard of its own (DeepSpeed reads it too). `tied_copy`: True on the last
    stage's copy of the embedding, False on its original, absent elsewhere; DeepSpeed leaves `ds_pipe_replicated` ones
    out of the gradient norm. `sequence_parallel`: used on this tensor-parallel rank's share of the tokens only.
    """
    parameters = dict(model.named_parameters())
    for entry in model_entries(arch, groups.pp.size):
        if entry.stage != groups.pp.rank:
            continue
        parameter = parameters[entry.megatron]
        parameter.tensor_model_parallel = entry.kind != "replicated"
        parameter.sequence_parallel = model.config.sequence_parallel and entry.kind == "replicated"
        if arch.tied and groups.pp.size > 1 and entry.kind == "vocab":
            parameter.tied_copy = entry.copy
            parameter.ds_pipe_replicated = entry.copy
