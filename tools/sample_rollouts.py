"""Sample rollouts for a file of prompts with Hugging Face `generate`, and grade them.

Input: JSON lines, one prompt per line:

    {"prompt_id": "p0", "prompt_ids": [...] | "prompt": "text" | "messages": [{"role": ..., "content": ...}, ...],
     "answer": ..., "check": "exact" | "contains" | "number" | "regex"}

Output: JSON lines in the rollouts format, `rollouts_per_prompt` rows per prompt in file order: the prompt is the group,
the log-probs are those of the sampled tokens at the sampling temperature, and the reward is 1 where the response passes
the check, else 0. Every prompt runs through the model once, whatever the number of its rollouts.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

TEXT_FIELDS = ("prompt_ids", "prompt", "messages")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompts file; `source` is `FILE:LINE`, `text` the value of the one field that gives the input."""

    prompt_id: str
    field: str
    text: Any
    answer: str
    check: str
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """How to sample.

    Attributes:
        rollouts_per_prompt: rows per prompt.
        max_new_tokens: longest response, the end-of-sequence token counted.
        temperature: of the sampling distribution; nothing else shapes it (no top-k, no top-p, no penalty).
        seed: a prompt's rollouts depend on it and on the prompt's id, not on the other prompts.
        batch: rollouts decoded at the same time. The scores take `batch x max_new_tokens x vocabulary x 4` bytes.
    """

    rollouts_per_prompt: int = 4
    max_new_tokens: int = 32
    temperature: float = 1.0
    seed: int = 0
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("rollouts_per_prompt", "max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"--temperature {self.temperature}: must be above 0; a greedy response has no log-prob")


def _normal(text: str) -> str:
    """Text without what an exact comparison should not depend on: case, white space, a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".")


def _contains(answer: str, response: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(_normal(answer))}(?!\w)", _normal(response)) is not None


def _number(answer: str, response: str) -> bool:
    found = NUMBER.findall(response)
    return bool(found) and float(found[-1].replace(",", "")) == float(answer)


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, response: _normal(answer) == _normal(response),
    "contains": _contains,
    "number": _number,
    "regex": lambda answer, response: re.search(answer, response) is not None,
}


def grade(prompt: Prompt, response: str) -> float:
    """1.0 where the response passes the prompt's check, else 0.0.

    `exact`: equal apart from case, white space and a final full stop; `contains`: the answer stands in it as whole
    words, case ignored; `number`: its last number is the answer; `regex`: the pattern is found in it.
    """
    return float(CHECKS[prompt.check](prompt.answer, response))


def read_prompts(path: Path) -> list[Prompt]:
    """Read and check a prompts file.

    Raises:
        ValueError: no prompts, or a line is wrong; the message has file, line, field and rule.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts file {path}: cannot be read: {error}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.prompt_id in prompts:
            first = prompts[prompt.prompt_id].source
            raise ValueError(f"{prompt.source}: prompt_id {prompt.prompt_id!r} is taken by {first}; ids must differ")
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise ValueError(f"prompts file {path}: has no prompts")
    return list(prompts.values())


def _parse(line: str, source: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{source}: must be an object, not {type(row).__name__}")
    for field in ("prompt_id", "answer", "check"):
        if field not in row:
            raise ValueError(f"{source}: {field} is missing; every prompt needs prompt_id, answer, check")
        if isinstance(row[field], bool) or not isinstance(row[field], str | int | float) or row[field] == "":
            raise ValueError(f"{source}: {field} = {json.dumps(row[field])} must be a string or a number, not empty")
    given = [field for field in TEXT_FIELDS if field in row]
    if len(given) != 1:
        raise ValueError(
            f"{source}: has {', '.join(given) or 'no input'}; give exactly one of {', '.join(TEXT_FIELDS)}"
        )
    _check_input(given[0], row[given[0]], source)
    if row["check"] not in CHECKS:
        raise ValueError(f"{source}: check = {row['check']!r} must be one of {', '.join(CHECKS)}")
    answer = str(row["answer"])
    try:
        if row["check"] == "number":
            float(answer)
        elif row["check"] == "regex":
            re.compile(answer)
    except (ValueError, re.error) as error:
        raise ValueError(f"{source}: answer = {answer!r} does not suit check {row['check']}: {error}") from None
    return Prompt(str(row["prompt_id"]), given[0], row[given[0]], answer, row["check"], source)


def _check_input(field: str, value: Any, source: str) -> None:
    good = {
        "prompt_ids": lambda: all(type(token) is int and token >= 0 for token in value),
        "messages": lambda: all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in value
        ),
        "prompt": lambda: True,
    }[field]
    kind = str if field == "prompt" else list
    if not isinstance(value, kind) or not value or not good():
        rule = {
            "prompt_ids": "a list of token ids, not empty",
            "prompt": "a text, not empty",
            "messages": "a list of objects with role and content, not empty",
        }[field]
        raise ValueError(f"{source}: {field} must be {rule}")


class Sampler:
    """A model and its tokenizer, ready to sample."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.settings = settings
        ends = model.generation_config.eos_token_id
        if ends is None:
            ends = tokenizer.eos_token_id
        if ends is None:
            raise ValueError("neither the model nor its tokenizer names an end-of-sequence token; set eos_token_id")
        self.ends = [ends] if isinstance(ends, int) else list(ends)
        # The folder's own sampling settings (top_k, penalties, ...) would shape the distribution behind the log-probs.
        model.generation_config = GenerationConfig(eos_token_id=self.ends, pad_token_id=self.ends[0])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt, the opening of the assistant's turn included for `messages`.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, no chat template, or no room for the response.
        """
        if prompt.field == "messages":
            if not self.tokenizer.chat_template:
                raise ValueError(
                    f"{prompt.source}: messages need a chat template, which the tokenizer lacks; give prompt"
                )
            encoded = self.tokenizer.apply_chat_template(prompt.text, add_generation_prompt=True, return_dict=True)
            ids = list(encoded["input_ids"])
        elif prompt.field == "prompt":
            ids = list(self.tokenizer(prompt.text)["input_ids"])
        else:
            ids = prompt.text
        vocabulary, context = self.model.config.vocab_size, self.model.config.max_position_embeddings
        if not ids:
            raise ValueError(f"{prompt.source}: {prompt.field} has no tokens")
        if max(ids) >= vocabulary:
            raise ValueError(f"{prompt.source}: token {max(ids)} is outside the vocabulary of {vocabulary}")
        if len(ids) + self.settings.max_new_tokens > context:
            raise ValueError(
                f"{prompt.source}: {len(ids)} prompt tokens and {self.settings.max_new_tokens} new ones exceed the "
                f"model's context of {context}; shorten the prompt or lower --max_new_tokens"
            )
        return ids

    @torch.inference_mode()
    def rollouts(self, prompt: Prompt) -> list[dict[str, Any]]:
        """All rows of one prompt, in the rollouts format."""
        ids = self.encode(prompt)
        torch.manual_seed(zlib.crc32(f"{self.settings.seed}/{prompt.prompt_id}".encode()))
        prompt_ids = torch.tensor([ids], device=self.model.device)
        state = self._state(prompt_ids)
        rows: list[dict[str, Any]] = []
        while len(rows) < self.settings.rollouts_per_prompt:
            count = min(self.settings.batch, self.settings.rollouts_per_prompt - len(rows))
            for tokens, logprobs in self._decode(prompt_ids, state, count):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                rows.append(
                    {
                        "group_id": prompt.prompt_id,
                        "rollout_id": f"{prompt.prompt_id}/{len(rows)}",
                        "token_ids": ids + tokens,
                        "prompt_length": len(ids),
                        "logprobs": [None] * len(ids) + logprobs,
                        "reward": grade(prompt, text),
                        "finish": "stop" if tokens[-1] in self.ends else "length",
                        "text": text,
                        "metadata": {"answer": prompt.answer, "check": prompt.check},
                    }
                )
        return rows

    def _state(self, prompt_ids: torch.Tensor) -> dict[str, Cache]:
        """The prompt's cache, computed once, under the keyword that this version of transformers calls it by.

        The last token stays out, because `generate` needs at least one to run; a prompt of one token has no cache.
        """
        if prompt_ids.shape[1] == 1:
            return {}
        output = self.model(prompt_ids[:, :-1], use_cache=True, logits_to_keep=1)
        return {name: value for name, value in output.items() if isinstance(value, Cache)}

    def _decode(
        self, prompt_ids: torch.Tensor, state: dict[str, Cache], count: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Sample `count` responses; yields tokens and log-probs in nats, up to and including the end token."""
        own = copy.deepcopy(state)
        for cache in own.values():
            cache.batch_repeat_interleave(count)
        inputs = prompt_ids.repeat(count, 1)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            temperature=self.settings.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.settings.max_new_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **own,
        )
        new_NT = output.sequences[:, inputs.shape[1] :]
        scores = zip(output.scores, new_NT.T, strict=True)
        logprobs_NT = torch.stack([s.float().log_softmax(-1).gather(1, t[:, None])[:, 0] for s, t in scores], dim=1)
        for tokens, logprobs in zip(new_NT.tolist(), logprobs_NT.tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
            yield tokens[:length], logprobs[:length]


def write_rollouts(path: Path, prompts: Sequence[Prompt], sampler: Sampler) -> int:
    """Sample every prompt and write the rows; the file appears complete or not at all. Returns the number of rows."""
    for prompt in prompts:
        sampler.encode(prompt)  # a prompt that cannot be sampled is reported before any time is spent
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    written, rewards = 0, 0.0
    start = time.perf_counter()
    try:
        with partial.open("w", encoding="utf-8") as file:
            for number, prompt in enumerate(prompts, start=1):
                began = time.perf_counter()
                rows = sampler.rollouts(prompt)
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                mean = sum(row["reward"] for row in rows) / len(rows)
                written, rewards = written + len(rows), rewards + mean * len(rows)
                print(
                    f"prompt {number}/{len(prompts)} {prompt.prompt_id} | {rows[0]['prompt_length']} tokens | "
                    f"{len(rows)} rollouts | reward {mean:.2f} | {time.perf_counter() - began:.1f} s",
                    flush=True,
                )
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{path}: {written} rollouts, mean reward {rewards / written:.3f}, {time.perf_counter() - start:.1f} s")
    return written


def load(folder: Path, *, device: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a Hugging Face folder, never from elsewhere.

    Raises:
        ValueError: no such folder.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {folder}: not a Hugging Face folder, config.json is missing")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model.to(device), tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and sample; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Settings()
    parser.add_argument("--model", type=Path, required=True, metavar="HF_DIR", help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="prompts, see above")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="rollouts to write")
    parser.add_argument("--rollouts_per_prompt", type=int, default=default.rollouts_per_prompt, metavar="N")
    parser.add_argument("--max_new_tokens", type=int, default=default.max_new_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=default.temperature)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--batch", type=int, default=default.batch, metavar="N", help="rollouts decoded at a time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args(arguments))
    try:
        settings = Settings(**{name: options[name] for name in Settings.__dataclass_fields__})
        prompts = read_prompts(options["prompts"])
        model, tokenizer = load(options["model"], device=options["device"], dtype=options["dtype"])
        write_rollouts(options["out"], prompts, Sampler(model, tokenizer, settings))
    except ValueError as error:
        print(f"sample_rollouts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
