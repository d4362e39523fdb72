"""What a Megatron user brings is taken as it is or refused by name; parameters keep their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

import megatron_branch
from megatron_branch import adopt, adopt_spec, get_forward_backward_func, make_planner
from megatron_branch.engine import host_cpu
from megatron_branch.engine.adopt import SUPPORTED
from megatron_branch.engine.groups import build_groups
from megatron_branch.engine.megatron_host import MegatronHost
from megatron_branch.engine.planner import BranchStep
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.plan.limits import BranchConfig
from tests.harness import run_ranks
from tests.worlds import leave_layout


class OtherWrapper(_BaseDataParallel):
    """Reduces gradients in a way of its own."""


class OwnLayer(TransformerLayer):
    """Nobody knows what it computes."""


def other_layer(spec: Any) -> None:
    spec.module = OwnLayer


def other_attention(spec: Any) -> None:
    spec.submodules.self_attention.module = IdentityOp


def other_core(spec: Any) -> None:
    spec.submodules.self_attention.submodules.core_attention = IdentityOp


def other_mask(spec: Any) -> None:
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_layer, "layer .* OwnLayer"),
        (other_attention, "self_attention .* IdentityOp"),
        (other_core, "core_attention .* IdentityOp"),
        (other_mask, "padding"),
    ],
)
def test_unknown_classes_are_refused_by_name(change: Callable[[Any], None], named: str) -> None:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    change(spec)
    with pytest.raises(ValueError, match=named):
        adopt_spec(spec)


def test_mixture_of_experts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mlp .* MoELayer"):
        adopt_spec(get_gpt_layer_local_spec(num_experts=2))


def test_the_spec_of_the_user_is_not_changed() -> None:
    spec = get_gpt_layer_local_spec()
    before = repr(spec)
    assert repr(adopt_spec(spec)) != before
    assert repr(spec) == before


def test_names_are_imported_at_first_use() -> None:
    assert set(megatron_branch.__all__) == {"adopt", "adopt_spec", "get_forward_backward_func", "make_planner"}
    with pytest.raises(AttributeError, match="nothing"):
        megatron_branch.nothing  # noqa: B018


def config(**settings: Any) -> TransformerConfig:
    plain = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1} | settings
    return TransformerConfig(**plain, hidden_dropout=0.0, attention_dropout=0.0)


def gpt(*, adopted: bool = True, positions: str = "rope", **settings: Any) -> GPTModel:
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config(**settings),
        adopt_spec(spec) if adopted else spec,
        vocab_size=16,
        max_sequence_length=32,
        position_embedding_type=positions,
    )


def refusals() -> dict[str, str]:
    """What each attempt was answered with, on one rank."""
    host_cpu.enter()
    build_groups(dp=1, cp=1, tp=1, pp=1)
    model_parallel_cuda_manual_seed(1)
    said: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)

    def run(model: Any, **options: Any) -> Any:
        step = BranchStep(planned=None, runtime=None)  # type: ignore[arg-type]
        arguments = {"num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1} | options
        return get_forward_backward_func()(
            forward_step_func=None, data_iterator=iter((step,)), model=model, **arguments
        )

    try:
        theirs, model = gpt(adopted=False), gpt()
        said["names"] = str(set(dict(theirs.named_parameters())) == set(dict(model.named_parameters())))
        said["keys"] = str(set(theirs.state_dict()) == set(model.state_dict()))
        attempt("layers", lambda: adopt(theirs))
        attempt("not adopted", lambda: make_planner(model))
        attempt("positions", lambda: adopt(gpt(positions="learned_absolute")))
        adopt(model)
        adopt(model)
        attempt("auto", lambda: make_planner(model, branch=BranchConfig(activations="auto", activation_budget_bytes=1)))
        attempt("recompute", lambda: make_planner(model, objective=ObjectiveConfig(old_logprobs="recompute")))
        attempt("ulysses", lambda: make_planner(model, ulysses=2))
        attempt("chunks", lambda: run([model, model]))
        attempt("non-loss", lambda: run(model, collect_non_loss_data=True, forward_only=True))
        host = MegatronHost(model)
        attempt("wrapper", lambda: MegatronHost(OtherWrapper(model.config, model)))
        gather = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
        wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # the whole one needs CUDA streams
        torch.nn.Module.__init__(wrapped)
        wrapped.ddp_config = gather
        attempt("gathering", lambda: MegatronHost(wrapped))
        attempt("three values", lambda: host.final(lambda output: (output, 3, {}))(torch.ones(())))
        said["no logits"] = str(_post_process(host, model))
        for name in SUPPORTED:
            model.config.__dict__[name] = "other"
            attempt(name, lambda: adopt(model))
            model.config.__dict__[name] = SUPPORTED[name][0][0]
        return said
    finally:
        leave_layout()


def _post_process(host: MegatronHost, model: GPTModel) -> list[bool]:
    """Whether the model has its head inside the block, and after an error there."""
    seen = []
    try:
        with host.without_logits():
            seen.append(model.post_process)
            raise KeyError
    except KeyError:
        return [*seen, model.post_process]


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    said = run_ranks(1, refusals)[0]
    assert said.pop("names") == said.pop("keys") == "True"
    assert said.pop("no logits") == "[False, True]"
    words = {
        "layers": "TransformerLayer",
        "not adopted": "adopt(model)",
        "positions": "learned_absolute",
        "auto": "activation",
        "recompute": "old_logprobs",
        "ulysses": "ulysses=2",
        "chunks": "interleaved",
        "wrapper": "OtherWrapper",
        "non-loss": "collect_non_loss_data",
        "gathering": "overlap_param_gather",
        "three values": "calculate_per_token_loss",
    }
    for name, answer in said.items():
        assert words.get(name, f"{name}=other") in answer, name


def too_few_heads() -> str:
    """What the planner says to one head for two ranks that exchange heads."""
    host_cpu.enter()
    build_groups(dp=1, cp=2, tp=1, pp=1)
    model_parallel_cuda_manual_seed(1)
    model = gpt(num_attention_heads=1)
    adopt(model)
    try:
        with pytest.raises(ValueError) as raised:
            make_planner(model, ulysses=2)
        return str(raised.value)
    finally:
        leave_layout()


def test_heads_that_ulysses_cannot_exchange_are_refused_by_the_planner() -> None:
    for said in run_ranks(2, too_few_heads):
        assert "over 2 ranks" in said and "1 attention heads" in said
