"""Small random models in Hugging Face folders, chosen so that faults show.

Weights are large (attention far from uniform), norms differ from 1, biases from 0; the vocabulary is a prime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

Family = Literal["llama", "qwen2", "qwen3"]
# Families that only the Transformers host computes.
Foreign = Literal["olmo2", "phi3", "granite", "mistral", "phi"]


def write_tiny_model(
    folder: Path,
    family: Family | Foreign,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 16,
    ffn: int = 48,
    vocab: int = 97,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    max_positions: int = 512,
    seed: int = 0,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write config, float32 safetensors and a word-level tokenizer (`t0` .. `t96`) into `folder` and return it.

    Load the tokenizer with `PreTrainedTokenizerFast`: for qwen2 `AutoTokenizer` insists on a class of its own.

    Args:
        folder: created if missing.
        family: `model_type`.
        head_dim: None leaves it to the config class (hidden / heads; 128 for qwen3); qwen2 has no such setting, so
            there hidden must be heads x head_dim or `head_dim` None.
        rope: `rope_parameters`; None is the class's default.
        extra: further settings of the config.
    """
    settings: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if head_dim is not None and family != "qwen2":
        settings["head_dim"] = head_dim
    settings |= extra or {}
    if rope is not None:
        settings["rope_parameters"] = rope
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder, vocab)
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> None:
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2").save_pretrained(folder)
