"""Folders are opened lazily, and a wrong one is one clear error."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_branch.engine.architecture import architecture_from_config
from megatron_branch.engine.hf_source import open_source
from tests.tiny import write_tiny_model

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def shard_file(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_and_parts_of_them_are_read(folder: Path, sharded: bool) -> None:
    expected = load_file(folder / "model.safetensors")
    if sharded:
        shard_file(folder)
    source = open_source(folder)
    assert source.config.model_type == "qwen3" and source.gguf_file is None and str(source) == str(folder)
    assert source.tensors.names() == expected.keys()
    for name, tensor in expected.items():
        assert source.tensors.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.tensors.read(name), tensor)
    assert torch.equal(source.tensors.read(Q, slice(3, 9), slice(1, 30)), expected[Q][3:9, 1:30])
    assert torch.equal(source.tensors.read("model.norm.weight", slice(5, 7)), expected["model.norm.weight"][5:7])


def rewrite(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return fault


def only_pickles(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def missing_shard(folder: Path) -> None:
    shard_file(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def misplaced(folder: Path) -> None:
    shard_file(folder)
    files = sorted(folder.glob("model-*.safetensors"))
    save_file({"other": torch.ones(1)}, files[0])


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def gguf_beside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "m.gguf").write_bytes(b"GGUF")


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"is not a folder; give a folder with config\.json"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; give a Hugging Face model folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not readable JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json holds a list, not an object"),
        (rewrite("config.json", lambda c: c.pop("model_type")), r"config\.json: model_type = None .* use one of llama"),
        (rewrite("config.json", lambda c: c.update(model_type="gemma3")), r"model_type = 'gemma3' .* use one of llama"),
        (
            rewrite("config.json", lambda c: c.update(hidden_size="wide")),
            r"config\.json cannot be read by transformers",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has neither model\.safetensors nor .*index\.json"),
        (only_pickles, r"pickled weights only .*\.save_pretrained\(NEW_FOLDER\)"),
        (missing_shard, r"names files that are missing: model-00002-of-"),
        (misplaced, r"lacks .*, which model\.safetensors\.index\.json places there"),
        (truncated, r"is not a readable safetensors file"),
        (gguf_beside, r"or set the GGUF file to 'm\.gguf'"),
        (adapter, r"is an adapter without its base model"),
    ],
)
def test_a_wrong_folder_is_one_clear_error(folder: Path, fault: Callable[[Path], object], message: str) -> None:
    fault(folder)
    with pytest.raises(ValueError, match=message):
        open_source(folder)


def test_no_pickle_is_ever_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_pickles(folder)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    with pytest.raises(ValueError, match="pickled weights only"):
        open_source(folder)


def write_gguf(
    folder: Path, file: Path, *, scaling: bool = False, extra: tuple[str, ...] = (), without: str | None = None
) -> None:
    """The tiny llama of `folder` as llama.cpp writes it: its own names, the rows of q and k in interleaved pairs."""
    import gguf

    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(97)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(97)])
    writer.add_token_merges(["t 1"])
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    for name in extra:
        writer.add_tensor(name, torch.ones(4).numpy())
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == without:
            continue
        for heads, part in ((4, "q_proj"), (2, "k_proj")):
            if part in name:
                tensor = tensor.reshape(heads, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_same_tensors(tmp_path: Path, tied: bool) -> None:
    tiny = write_tiny_model(tmp_path / "tiny", "llama", head_dim=None, tied=tied)
    write_gguf(tiny, tmp_path / "tiny.gguf")
    source = open_source(tmp_path, "tiny.gguf")
    expected = load_file(tiny / "model.safetensors")
    arch = architecture_from_config(source.config, source=str(source))
    plain = architecture_from_config(open_source(tiny).config, source="tiny")
    assert arch == dataclasses.replace(plain, norm_eps=float(torch.tensor(plain.norm_eps)))  # GGUF holds float32
    assert source.tensors.names() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(source.tensors.read(name), tensor), name
    assert torch.equal(source.tensors.read(Q, slice(3, 9), slice(1, 30)), expected[Q][3:9, 1:30])
    assert torch.equal(source.tensors.read("model.norm.weight", slice(5, 7)), expected["model.norm.weight"][5:7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": True}, r"llama\.rope\.scaling\.type: scaled rotary positions are not read from GGUF; use"),
        ({"extra": ("rope_freqs.weight",)}, r"rope_freqs\.weight: scaled rotary positions are not read from GGUF; use"),
        ({"extra": ("blk.0.attn_output.bias",)}, r"has 22 tensors, the model has 21; use the model's safetensors"),
        ({"without": "model.layers.1.mlp.up_proj.weight"}, r"has 20 tensors, the model has 21; use"),
    ],
    ids=["yarn", "llama3", "a bias that llama lacks", "a tensor missing"],
)
def test_what_transformers_would_lose_from_gguf_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    tiny = write_tiny_model(tmp_path / "tiny", "llama", head_dim=None)
    write_gguf(tiny, tmp_path / "tiny.gguf", **options)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path, "tiny.gguf").tensors.names()


def test_a_missing_or_broken_gguf_file_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.gguf does not exist; give the name of a GGUF file in"):
        open_source(folder, "m.gguf")
    (folder / "m.gguf").write_bytes(b"not a GGUF file at all, but long enough to be read as a header")
    with pytest.raises(ValueError, match=r"m\.gguf cannot be read as GGUF"):
        open_source(folder, "m.gguf")
