"""The prompts suit the sampler, and the answers stand in the excerpts that are asked about."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tools.quickstart_prompts import EXCERPTS, cut, main, prompts
from tools.sample_rollouts import grade, read_prompts


def test_the_sampler_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prompts.jsonl"
    assert main(["--out", str(path)]) == 0
    read = read_prompts(path)
    assert [prompt.prompt_id for prompt in read] == [q.prompt_id for excerpt in EXCERPTS for q in excerpt.questions]
    assert all(prompt.field == "messages" for prompt in read)


def test_questions_over_one_excerpt_share_all_but_the_question() -> None:
    rows = iter(prompts(5200))
    for excerpt in EXCERPTS:
        texts = [next(rows)["messages"][0]["content"] for _ in excerpt.questions]
        for (left, right), (first, second) in zip(pairwise(texts), pairwise(excerpt.questions), strict=True):
            shared = os.path.commonprefix([left, right])
            assert len(shared) >= len(left) - len(first.text) > 4000
            assert left.endswith(first.text) and right.endswith(second.text)


def test_a_right_answer_is_graded_as_right_and_a_wrong_one_as_wrong(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "p.jsonl")])
    for prompt in read_prompts(tmp_path / "p.jsonl"):
        right = "Yes, it does." if prompt.check == "regex" else f'It raises the "{prompt.answer}" exception.'
        wrong = "No. Yes is wrong." if prompt.check == "regex" else f"It raises My{prompt.answer}."
        assert grade(prompt, right) == 1.0
        assert grade(prompt, wrong) == 0.0


def test_a_text_is_cut_between_paragraphs() -> None:
    assert cut("one\n\ntwo\n\nthree", 9) == "one\n\ntwo"
    assert cut("one\n\ntwo", 8) == "one\n\ntwo"
    assert cut("one\n\ntwo", 7) == "one"
    with pytest.raises(ValueError, match="--excerpt_chars 2: too few"):
        cut("one\n\ntwo", 2)


def test_an_excerpt_without_the_answer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "p.jsonl"), "--excerpt_chars", "1000"]) == 1
    assert re.search(r"question division-by-zero: .* is not in the first 1000 characters", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_missing_topic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(prompts.__globals__["topics"], "comparisons")
    with pytest.raises(ValueError, match="has no topic comparisons"):
        prompts(5200)


def test_rows_are_plain_json() -> None:
    assert json.loads(json.dumps(prompts(5200))) == prompts(5200)
