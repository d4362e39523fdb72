"""Hugging Face <-> Megatron over every layout: the same logits, the same tensors bit for bit, a folder that loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.tiny import Family, write_tiny_model

# Hugging Face computes norms and rotary angles in float32 (unit roundoff 6e-8) whatever the model's dtype; a handful of
# such roundings per layer over two layers stays below this, and a 1 % fault of any weight is far above it.
HF_TOLERANCE = 2e-6

# Gapped, so that a wrong frequency shows however rotary positions cancel; past every original length used here.
POSITIONS = (0, 1, 2, 5, 6, 7, 40, 41, 300, 301, 900)

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with its own factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
    },
}


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    tp: int = 1
    pp: int = 1
    export: bool = False


@contextmanager
def _built(case: Case) -> Iterator[tuple[Any, ...]]:
    """A plain GPTModel (Megatron's own attention) in float64 with the weights of the case."""
    import torch
    import torch.distributed as dist
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_branch.engine import host_cpu
    from megatron_branch.engine.architecture import architecture_from_config
    from megatron_branch.engine.convert import load_weights
    from megatron_branch.engine.groups import build_groups
    from megatron_branch.engine.hf_source import open_source
    from megatron_branch.engine.model_config import transformer_config
    from megatron_branch.engine.rope import PositionRope, inverse_frequencies
    from tests.worlds import leave_layout

    class DenseAttention(DotProductAttention):
        def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> torch.Tensor:
            return super().forward(*args, **options)

    host_cpu.enter()
    source = open_source(case.folder)
    arch = architecture_from_config(source.config, source=str(source))
    groups = build_groups(dp=dist.get_world_size() // (case.tp * case.pp), cp=1, tp=case.tp, pp=case.pp)
    try:
        model_parallel_cuda_manual_seed(1)
        config = transformer_config(arch, groups, torch.float64)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
        spec.submodules.self_attention.submodules.core_attention = DenseAttention
        model = GPTModel(
            config,
            spec,
            vocab_size=arch.padded_vocab(case.tp),
            max_sequence_length=arch.max_positions,
            pre_process=groups.first_stage,
            post_process=groups.last_stage,
            parallel_output=False,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=arch.tied,
        ).double()
        model.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rope, arch.head_dim)[0]
        model.rotary_pos_emb = PositionRope.of(model.rotary_pos_emb)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # whatever loading leaves out, shows
        load_weights(model, source, arch, groups)
        yield model, source, arch, groups
    finally:
        leave_layout()


def _tokens(vocab: int) -> Any:
    import torch

    return torch.randint(0, vocab, (1, len(POSITIONS)), generator=torch.Generator().manual_seed(3))


def _stage_logits(model: Any, arch: Any, groups: Any) -> Any:
    """Logits `[T, padded vocab]` on the last stage (else None); hidden states travel by plain send and receive."""
    import torch
    import torch.distributed as dist

    from megatron_branch.engine.spec import BranchParams

    positions = torch.tensor(POSITIONS)
    params = BranchParams(qkv_format="sbhd", unit=SimpleNamespace(positions=positions))
    mask = torch.triu(torch.ones(len(POSITIONS), len(POSITIONS), dtype=torch.bool), 1)[None, None]
    hidden = torch.empty(len(POSITIONS), 1, arch.hidden, dtype=torch.float64)
    with torch.no_grad():
        if not groups.first_stage:
            dist.recv(hidden, src=groups.pp.ranks[groups.pp.rank - 1])
            model.set_input_tensor(hidden)
        out = model(_tokens(arch.vocab), positions[None], mask, packed_seq_params=params)
        if groups.last_stage:
            return out[0]
        dist.send(out.contiguous(), dst=groups.pp.ranks[groups.pp.rank + 1])
        return None


@cache
def _hf_logits(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return model(
            input_ids=_tokens(model.config.vocab_size),
            position_ids=torch.tensor(POSITIONS)[None],
            attention_mask=torch.ones(1, len(POSITIONS), dtype=torch.int64),  # else a gap would start a new sequence
        ).logits[0]


def _check_logits(case: Case, model: Any, arch: Any, groups: Any) -> None:
    ours = _stage_logits(model, arch, groups)
    if ours is None:
        return
    theirs = _hf_logits(case.folder)
    error = float((ours[:, : arch.vocab] - theirs).norm() / theirs.norm())
    assert error <= HF_TOLERANCE, f"{case}: logits differ by {error}"


def _check_padding(model: Any, arch: Any, groups: Any) -> None:
    """Rows past the vocabulary are zero, and only those."""
    import torch

    each = arch.padded_vocab(groups.tp.size) // groups.tp.size
    rows = torch.arange(each) + groups.tp.rank * each
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert torch.equal(parameter.norm(dim=1) == 0, rows >= arch.vocab), name


def _check_tied_copy(model: Any, arch: Any, groups: Any) -> None:
    """The last stage's copy of a tied embedding equals the first stage's."""
    import torch
    import torch.distributed as dist

    if not arch.tied or groups.embedding is None:
        return
    weight = model.shared_embedding_or_output_weight().detach()
    other = weight.clone()
    dist.broadcast(other, src=groups.embedding.ranks[0], group=groups.embedding.group)
    assert torch.equal(weight, other)


def _check_round_trip(case: Case, model: Any, arch: Any, groups: Any) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron_branch.engine.convert import gather_full

    asked: list[str] = []

    def tensor_of(name: str, parameter: Any) -> Any:
        asked.append(name)
        return parameter

    pairs = list(gather_full(model, arch, groups, tensor_of, dtype=torch.float64))
    held = {name for name, _ in model.named_parameters()} - ({"output_layer.weight"} if arch.tied else set())
    assert len(asked) == len(held) and set(asked) == held, "each own parameter is asked for once, on every rank"
    if dist.get_rank() != 0:
        assert not pairs
        return
    written = load_file(case.folder / "model.safetensors")
    assert len(pairs) == len(written) == len(dict(pairs)), f"{case}: {[name for name, _ in pairs]}"
    for name, tensor in pairs:
        assert torch.equal(tensor, written[name].double()), f"{case}: {name}"


def _check_export(case: Case, model: Any, source: Any, arch: Any, groups: Any, scratch: Path) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from megatron_branch.engine.hf_export import export_hf

    target = scratch / f"{case.name}-tp{case.tp}-pp{case.pp}"
    options = {"source": source, "dtype": torch.float32, "shard_bytes": 20_000}
    export_hf(model, arch, groups, target, **options)
    with pytest.raises(ValueError, match="exists; remove it or choose another"):
        export_hf(model, arch, groups, target, **options)
    if dist.get_rank() != 0:
        return
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1, "all files may be read by the same people"
    assert not list(scratch.glob(".*")) and len(list(target.glob("model-*-of-*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    original = AutoModelForCausalLM.from_pretrained(case.folder)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == original.config.to_dict() | {"_name_or_path": ""}
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{case}: {name}"
    assert PreTrainedTokenizerFast.from_pretrained(target)("t5 t96")["input_ids"] == [5, 96]


def _run_cases(cases: list[Case], scratch: str) -> None:
    for case in cases:
        with _built(case) as (model, source, arch, groups):
            _check_padding(model, arch, groups)
            _check_tied_copy(model, arch, groups)
            _check_logits(case, model, arch, groups)
            _check_round_trip(case, model, arch, groups)
            if case.export:
                _check_export(case, model, source, arch, groups, Path(scratch))


FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


def test_families_and_ropes_on_one_rank(tmp_path: Path) -> None:
    cases = []
    for family in FAMILIES:
        for tied in (False, True):
            name = f"{family}-{'tied' if tied else 'untied'}"
            cases.append(Case(name, write_tiny_model(tmp_path / name, family, tied=tied), export=True))
    for rope, settings in ROPES.items():
        name = f"llama {rope}"
        cases.append(Case(name, write_tiny_model(tmp_path / name, "llama", rope=settings, max_positions=1024)))
    (tmp_path / "out").mkdir()
    run_ranks(1, _run_cases, cases, str(tmp_path / "out"), timeout_s=120)


def test_layouts_of_four_ranks(tmp_path: Path) -> None:
    """dp fills what tp x pp leaves, so replicas are there too; 5 layers split unevenly."""
    cases = []
    for family, tied, layers, layouts in (
        ("llama", False, 5, ((2, 1), (1, 2), (2, 2), (1, 4))),
        ("qwen2", True, 4, ((2, 1), (1, 2), (2, 2), (1, 4))),
        ("qwen3", False, 2, ((2, 2),)),
        ("qwen3", True, 2, ((2, 1),)),
    ):
        name = f"{family}-{layers}"
        folder = write_tiny_model(tmp_path / f"{name}-{tied}", family, tied=tied, layers=layers)
        cases += [Case(name, folder, tp, pp, export=tp * pp == 4) for tp, pp in layouts]
    (tmp_path / "out").mkdir()
    run_ranks(4, _run_cases, cases, str(tmp_path / "out"), timeout_s=240)


def _break(folder: Path, **changes: Any) -> Path:
    """Replace tensors of a model folder; None removes one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return folder


def _load_all(accepted: list[Case], refused: list[tuple[Case, str]]) -> None:
    for case in accepted:
        with _built(case):
            pass
    for case, message in refused:
        with pytest.raises(ValueError, match=message), _built(case):
            pass


def test_tensors_that_do_not_belong(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    def case(name: str, tied: bool = False, **changes: Any) -> Case:
        return Case(name, _break(write_tiny_model(tmp_path / name, "llama", tied=tied), **changes))

    plain = write_tiny_model(tmp_path / "plain", "llama", tied=True)
    head = load_file(plain / "model.safetensors")["model.embed_tokens.weight"].clone()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    accepted = [case("equal head of a tied model, old buffer", True, **{"lm_head.weight": head, buffer: torch.ones(8)})]
    refused = [
        (case("missing", **{"model.norm.weight": None}), r"missing: model\.norm\.weight; give"),
        (
            case("left over", **{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            r"left over: .*q_proj\.bias; give",
        ),
        (case("shape", **{"model.norm.weight": torch.ones(33)}), r"model\.norm\.weight has shape \[33\].*says \[32\]"),
        (
            case("long", **{"lm_head.weight": torch.ones(99, 32)}),
            r"lm_head\.weight has shape \[99, 32\].*says \[97, 32\]",
        ),
        (
            case("integers", **{"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"norm\.weight has dtype torch\.int8",
        ),
        (
            case("other head of a tied model", True, **{"lm_head.weight": head + 1}),
            r"lm_head\.weight differs from model\.emb",
        ),
    ]
    run_ranks(1, _load_all, accepted, refused, timeout_s=60)
