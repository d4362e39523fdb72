"""The Transformers host gives the numbers of plain Hugging Face autograd, and of the Megatron host where there is one.

Trees three deep with unequal tails, chunks shorter than a node; dp, cp with pass-Q and with Ulysses, ZeRO.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_branch.attention.backends import select_kernel
from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.config import Config, make_config
from megatron_branch.engine.checked import check_model
from megatron_branch.engine.dump import dump_step
from megatron_branch.engine.transformers_arch import transformers_architecture
from megatron_branch.engine.transformers_host import ATTENTION, TransformersModel, build_transformers_model
from megatron_branch.engine.transformers_probe import probe
from megatron_branch.objective.logprobs import HeadSettings
from megatron_branch.rollouts.synthetic import odd_rollouts, write_rollouts
from tests.harness import run_ranks
from tests.parity.hf_reference import reference
from tests.parity.steps import Case, Numbers, assert_same, compute_all, worst_gradient, worst_logprob
from tests.tiny import write_tiny_model
from tests.worlds import leave_layout
from tools.dump_step import configure, parse

ROLLOUTS = odd_rollouts(97, 0)
SHARED = ("llama", "qwen2", "qwen3")
EXTRA: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "granite": {
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 1.3,
    },
}
FAMILIES = (*SHARED, *EXTRA)
# Float64, but Hugging Face casts norms and tables of rotary positions to float32: 2**-24 in the chain of each layer.
HF_FLOAT32 = 1e-6
FLOAT32 = 1e-5  # as in test_exact
ZERO = [f"--dp 2 --zero {stage}" for stage in range(4)] + ["--cp 2 --zero 3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {f: write_tiny_model(folder / f, f, tied=f == "granite", extra=EXTRA.get(f)) for f in FAMILIES}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, Numbers]:
    """Plain Hugging Face autograd, every rollout alone."""
    return {family: truth(folder) for family, folder in models.items()}


def truth(folder: Path, *, detached: bool = False) -> Numbers:
    found = reference(folder, ROLLOUTS, detached=detached, float32_norms=True)
    norm = sum(gradient.square().sum() for gradient in found.gradients.values()) ** 0.5
    return Numbers(found.gradients, found.logprobs, found.loss, float(norm))


def hosted(models: dict[str, Path], family: str, layout: tuple[int, int, int, int] = (1, 1, 1, 1), **keys: Any) -> Case:
    return Case(models[family], layout, **({"host": "transformers", "chunk_tokens": 7} | keys))


def check(cases: Sequence[Case], plain: dict[str, Numbers]) -> list[Numbers]:
    """Against plain Hugging Face, on one world; bytes of state against their prediction."""
    (world,) = {case.world for case in cases}
    by_rank = run_ranks(world, compute_all, cases, ROLLOUTS, timeout_s=200)
    for place, case in enumerate(cases):
        assert_same(case, by_rank[0][place], plain[case.model.name], HF_FLOAT32)
        assert all(rank[place].state_bytes == rank[place].predicted_bytes for rank in by_rank)
        assert case.gradient == "dense" or by_rank[0][place].replays > 0
    return by_rank[0]


def test_exact_and_dense_are_plain_hugging_face(models: dict[str, Path], plain: dict[str, Numbers]) -> None:
    cases = [hosted(models, family, gradient=gradient) for family in FAMILIES for gradient in ("exact", "dense")]
    numbers = check(cases, plain)
    for exact, dense, case in zip(numbers[::2], numbers[1::2], cases[::2], strict=True):
        assert_same(case, exact, dense, HF_FLOAT32)


def test_megatron_host_gives_the_same(models: dict[str, Path]) -> None:
    both = [hosted(models, family, host=host) for family in SHARED for host in ("transformers", "megatron")]
    numbers = run_ranks(1, compute_all, both, ROLLOUTS, timeout_s=200)[0]
    for ours, megatron, case in zip(numbers[::2], numbers[1::2], both[::2], strict=True):
        assert_same(case, ours, megatron, HF_FLOAT32)


def test_two_ranks(models: dict[str, Path], plain: dict[str, Numbers]) -> None:
    cases = [hosted(models, family, (1, 2, 1, 1)) for family in FAMILIES]
    cases += [hosted(models, "phi3", (1, 2, 1, 1), ulysses=2), hosted(models, "olmo2", (1, 1, 1, 2))]
    cases += [hosted(models, "granite", (1, 2, 1, 1), gradient="dense")]
    check(cases, plain)


def test_four_ranks(models: dict[str, Path], plain: dict[str, Numbers]) -> None:
    cases = [hosted(models, family, (1, 4, 1, 1), chunk_tokens=16) for family in EXTRA]
    check([*cases, hosted(models, "granite", (1, 2, 1, 2), pack_tokens=12)], plain)


def test_detached(models: dict[str, Path]) -> None:
    case = hosted(models, "granite", gradient="detached")
    numbers = run_ranks(1, compute_all, [case], ROLLOUTS, timeout_s=100)[0][0]
    assert_same(case, numbers, truth(models["granite"], detached=True), HF_FLOAT32)


def dump_all(calls: Sequence[tuple[Config, str, bool]]) -> None:
    for call in calls:
        dump_step(*call)
        leave_layout()


def test_every_zero_stage(models: dict[str, Path], plain: dict[str, Numbers], tmp_path: Path) -> None:
    """Through DeepSpeed and the tool; an untied and a tied head."""
    write_rollouts(tmp_path / "rollouts.jsonl", ROLLOUTS)
    calls, outs = [], {}
    for family in ("phi3", "granite"):
        for command in ZERO if family == "phi3" else ZERO[3:4]:
            out = tmp_path / f"{family}{command.replace(' ', '')}.safetensors"
            files = ["--model", str(models[family]), "--rollouts", str(tmp_path / "rollouts.jsonl"), "--out", str(out)]
            options = parse([*files, *command.split(), "--chunk_tokens", "16", "model.host=transformers"])
            calls.append((configure(options), options.out, True))
            outs[out] = family
    run_ranks(2, dump_all, calls, timeout_s=200)
    for out, family in outs.items():
        facts = json.loads(out.with_name(f"{out.name}.json").read_text())
        numbers, expected = Numbers(load_file(out), facts["logprobs"]), plain[family]
        assert worst_gradient(numbers, expected)[0] < FLOAT32, out.name
        assert worst_logprob(numbers, expected) < FLOAT32, out.name
        assert abs(facts["grad_norm"] / expected.grad_norm - 1) < FLOAT32, out.name
        assert abs(facts["loss"] / expected.loss - 1) < FLOAT32, out.name


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("parallel.tp=2", "parallel.tp=2"),
        ("parallel.pp=2", "parallel.pp=2"),
        ("branch.activations=retain", "branch.activations=retain"),
        ("branch.recompute_layers=true", "branch.recompute_layers"),
        ("model.gguf_file=m.gguf", "model.gguf_file"),
    ],
)
def test_keys_of_the_megatron_host_are_refused(key: str, named: str) -> None:
    values = {"model": {"path": "m", "host": "transformers"}, "data": {"rollouts": "unused"}}
    with pytest.raises(ValueError, match=f"{named}.*model.host"):
        make_config(values, [key])


@pytest.mark.parametrize(
    ("family", "extra", "named"),
    [
        ("mistral", {"sliding_window": 8}, "sliding_window = 8"),
        ("phi3", {"pad_token_id": 0, "attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "layer_types"),
        ("phi", {}, "head must be a linear layer without bias"),
    ],
)
def test_models_are_refused_by_name(tmp_path: Path, family: Any, extra: dict[str, Any], named: str) -> None:
    folder = write_tiny_model(tmp_path / family, family, extra=extra)
    with pytest.raises(ValueError, match=named):
        check_model(Case(folder, host="transformers").config())


def loaded(folder: Path, kind: type[TransformersModel] = TransformersModel) -> TransformersModel:
    config = check_model(Case(folder, host="transformers").config()).source.config
    arch = transformers_architecture(config, source=str(folder))
    head = HeadSettings(temperature=1.0, vocab=97, chunk_tokens=64, entropy=False)
    model = build_transformers_model(arch, config, dtype=torch.float64, head=head, device=torch.device("cpu"))
    model.hf.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return kind(model.hf, head, model.logit_factor)


def run_probe(model: TransformersModel) -> None:
    kernel = select_kernel("auto", device=torch.device("cpu"), dtype=torch.float64)
    probe(model, kernel, vocab=97, source="folder")


class Restarting(TransformersModel):
    """Counts positions from the first token of each pass."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, unit: PassDescriptor) -> Tensor:
        return super().hidden(input_ids, position_ids - position_ids[:, :1], unit)


def test_the_probe_accepts_what_parity_is_shown_for(models: dict[str, Path]) -> None:
    for family in FAMILIES:
        run_probe(loaded(models[family]))


def test_the_probe_finds_positions_that_restart(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="logits of 12 tokens differ"):
        run_probe(loaded(models["olmo2"], Restarting))


def test_the_probe_finds_an_unknown_multiplier(models: dict[str, Path]) -> None:
    model = loaded(models["granite"])
    model.logit_factor = 1.0
    with pytest.raises(ValueError, match="logits of 12 tokens differ"):
        run_probe(model)


@pytest.mark.parametrize("argument", ["sliding_window", "softcap", "s_aux", "attention_mask"])
def test_unknown_arguments_of_attention_are_refused(models: dict[str, Path], argument: str) -> None:
    """As the probe meets them in layers whose config does not tell."""
    model = loaded(models["llama"])
    for layer in model.hf.model.layers:
        layer.self_attn.forward = partial(_with_argument, layer.self_attn.forward, argument)
    with pytest.raises(ValueError, match=f"folder: LlamaAttention gives its attention function {argument}"):
        run_probe(model)


def _with_argument(forward: Callable[..., Any], argument: str, *args: Any, **keys: Any) -> Any:
    if keys.get("branch_pass") is not None:
        keys[argument] = torch.ones(1)
    return forward(*args, **keys)


def test_the_attention_is_registered_with_transformers(models: dict[str, Path]) -> None:
    assert loaded(models["llama"]).hf.config._attn_implementation == ATTENTION
