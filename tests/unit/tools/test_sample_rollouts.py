"""The sampler's rows are what they claim: exact log-probs, true ends, strict grades; errors name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from megatron_branch.rollouts.reader import read_rollouts
from tests.tiny import write_tiny_model
from tools.sample_rollouts import Prompt, Sampler, Settings, grade, main, read_prompts, write_rollouts

# float32 against float64: the tiny model's logits are below 100 and go through two layers of width 32.
LOGPROB_TOLERANCE = 2e-4
END = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose own sampling settings would shape the distribution."""
    path = write_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    GenerationConfig(eos_token_id=END, do_sample=True, top_k=2, top_p=0.5, repetition_penalty=1.5).save_pretrained(path)
    return path


def sampler(folder: Path, **settings: Any) -> Sampler:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Sampler(model, PreTrainedTokenizerFast.from_pretrained(folder), Settings(**settings))


def prompt(ids: list[int], prompt_id: str = "p", answer: str = "t5", check: str = "contains") -> Prompt:
    return Prompt(prompt_id, "prompt_ids", ids, answer, check, "prompts.jsonl:1")


def prompts_file(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ids", [[7, 8, 9, 10, 11], [7]], ids=["five-token prompt", "one-token prompt"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_dense_pass_at_the_sampling_temperature(
    folder: Path, ids: list[int], temperature: float
) -> None:
    rows = sampler(folder, rollouts_per_prompt=5, max_new_tokens=12, temperature=temperature, batch=2).rollouts(
        prompt(ids)
    )
    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert len(rows) == 5
    for row in rows:
        tokens = torch.tensor([row["token_ids"]])
        logp = (truth(tokens).logits[0, :-1] / temperature).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert row["logprobs"][: len(ids)] == [None] * len(ids)
        expected = logp[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(row["logprobs"][len(ids) :], expected, atol=LOGPROB_TOLERANCE, rtol=0)
    assert len({tuple(row["token_ids"]) for row in rows}) > 1


def test_sampled_tokens_follow_the_untouched_distribution(folder: Path) -> None:
    """First tokens over many rollouts: without top-k they spread as the softmax says."""
    rows = sampler(folder, rollouts_per_prompt=2000, max_new_tokens=1, batch=2000).rollouts(prompt([7, 8, 9]))
    counts = np.bincount([row["token_ids"][3] for row in rows], minlength=97)
    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    p = truth(torch.tensor([[7, 8, 9]])).logits[0, -1].softmax(-1).detach().numpy()
    # Five standard deviations of a binomial count, for each token.
    assert np.all(np.abs(counts - 2000 * p) <= 5 * np.sqrt(2000 * p * (1 - p)) + 1)


def test_a_response_ends_with_the_end_token_or_at_the_limit(folder: Path) -> None:
    rows = sampler(folder, rollouts_per_prompt=200, max_new_tokens=4, batch=200).rollouts(prompt([7, 8, 9]))
    for row in rows:
        response = row["token_ids"][3:]
        assert END not in response[:-1]
        assert row["finish"] == ("stop" if response[-1] == END else "length")
        assert len(response) == 4 or row["finish"] == "stop"
    assert {row["finish"] for row in rows} == {"stop", "length"}


def test_the_file_is_read_by_the_trainer_and_does_not_depend_on_other_prompts(folder: Path, tmp_path: Path) -> None:
    prompts = [prompt([7, 8, 9], "a"), prompt([7, 8], "b")]
    assert write_rollouts(tmp_path / "both.jsonl", prompts, sampler(folder)) == 8
    write_rollouts(tmp_path / "one.jsonl", prompts[1:], sampler(folder))
    both = (tmp_path / "both.jsonl").read_text().splitlines()
    assert (tmp_path / "one.jsonl").read_text().splitlines() == both[4:]
    rollouts = list(read_rollouts(tmp_path / "both.jsonl"))
    assert [rollout.group_id for rollout in rollouts] == ["a"] * 4 + ["b"] * 4
    assert [rollout.prompt_length for rollout in rollouts] == [3] * 4 + [2] * 4
    assert all(rollout.logprobs is not None and rollout.reward in (0.0, 1.0) for rollout in rollouts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.jsonl", "one.jsonl"]


def test_rollouts_depend_on_the_seed_and_the_prompt_id(folder: Path) -> None:
    def sampled(prompt_id: str, seed: int) -> list[list[int]]:
        return [row["token_ids"] for row in sampler(folder, seed=seed).rollouts(prompt([7, 8, 9], prompt_id))]

    assert sampled("a", 0) == sampled("a", 0)
    assert sampled("a", 0) != sampled("b", 0)
    assert sampled("a", 0) != sampled("a", 1)


def test_a_failure_leaves_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("stopped")

    one = sampler(folder)
    monkeypatch.setattr(one, "rollouts", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        write_rollouts(tmp_path / "out.jsonl", [prompt([7])], one)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("check", "answer", "response", "reward"),
    [
        ("exact", "Yes", " yes.\n", 1),
        ("exact", "yes", "yes it is", 0),
        ("contains", "finally", 'The "finally" clause', 1),
        ("contains", "final", 'The "finally" clause', 0),
        ("contains", "TypeError", "MyTypeError", 0),
        ("contains", "True", "it is true", 1),
        ("contains", "**", "x ** y", 1),
        ("number", "7", "3 plus 4 is 7.", 1),
        ("number", "1234.5", "about 1,234.50", 1),
        ("number", "7", "7 or 8", 0),
        ("number", "7", "seven", 0),
        ("regex", r"^\W*No\b", "No, it is not", 1),
        ("regex", r"^\W*No\b", "Yes. No.", 0),
    ],
)
def test_grades(check: str, answer: str, response: str, reward: float) -> None:
    assert grade(prompt([1], answer=answer, check=check), response) == reward


GOOD = {"prompt_id": "p", "prompt": "t1", "answer": "t5", "check": "contains"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f.jsonl:2: not JSON"),
        ("[]", "f.jsonl:2: must be an object, not list"),
        ({**GOOD, "prompt_id": "q", "prompt_ids": [1]}, "has prompt_ids, prompt; give exactly one of"),
        ({"prompt_id": "q", "answer": "x", "check": "exact"}, "has no input; give exactly one of"),
        ({"prompt_id": "q", "prompt": "x", "check": "exact"}, "f.jsonl:2: answer is missing"),
        ({**GOOD, "prompt_id": None}, "prompt_id = null must be a string or a number"),
        (GOOD, "prompt_id 'p' is taken by .*f.jsonl:1"),
        ({**GOOD, "prompt_id": "q", "check": "like"}, "check = 'like' must be one of exact, contains, number, regex"),
        ({**GOOD, "prompt_id": "q", "check": "number"}, "answer = 't5' does not suit check number"),
        ({**GOOD, "prompt_id": "q", "check": "regex", "answer": "("}, "does not suit check regex"),
        ({**GOOD, "prompt_id": "q", "prompt": ""}, "prompt must be a text, not empty"),
        ({"prompt_id": "q", "prompt_ids": [1, -1], "answer": "x", "check": "exact"}, "prompt_ids must be a list"),
        ({"prompt_id": "q", "messages": [{"role": "user"}], "answer": "x", "check": "exact"}, "role and content"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(prompts_file(tmp_path / "f.jsonl", GOOD, line))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([97], "token 97 is outside the vocabulary of 97"), ([7] * 500, "500 prompt tokens and 32 new ones exceed")],
    ids=["token outside the vocabulary", "prompt too long"],
)
def test_a_prompt_that_cannot_be_sampled_is_reported_before_sampling(
    folder: Path, tmp_path: Path, ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"prompts.jsonl:1: {message}"):
        write_rollouts(tmp_path / "out.jsonl", [prompt([7], "a"), prompt(ids, "b")], sampler(folder))
    assert not list(tmp_path.iterdir())


def test_the_command_reports_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = str(prompts_file(tmp_path / "f.jsonl", GOOD))
    fixed = ["--prompts", prompts, "--out", str(tmp_path / "out.jsonl"), "--model", str(tmp_path)]
    assert main(fixed) == 1
    assert "not a Hugging Face folder" in capsys.readouterr().err
    assert main([*fixed, "--temperature", "0"]) == 1
    assert "--temperature 0.0: must be above 0" in capsys.readouterr().err
