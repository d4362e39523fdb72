"""Write the quickstart's prompts: questions over long excerpts of the Python reference, with checkable answers.

Input: `pydoc_data.topics`, the language reference that ships in the standard library.
Output: JSON lines for `tools/sample_rollouts.py`. The excerpt comes first and the question last, so that all questions
over one excerpt share its tokens, and stand next to each other, so that one training step has them in one tree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """A question; `evidence` is a passage (white space aside) that answers it and must be in the excerpt."""

    prompt_id: str
    text: str
    answer: str
    check: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Topics of the reference, one after the other, and what is asked about them."""

    names: tuple[str, ...]
    questions: tuple[Question, ...]


YES = r"^\W*[Yy]es\b"
EXCERPTS = (
    Excerpt(
        ("unary", "power", "binary"),
        (
            Question(
                "division-by-zero",
                "Which exception does division by zero raise? Answer with its name.",
                "ZeroDivisionError",
                "contains",
                'Division by zero raises the "ZeroDivisionError" exception',
            ),
            Question(
                "power-binds",
                "Does the power operator bind more tightly than unary operators on its left? Answer yes or no.",
                YES,
                "regex",
                "The power operator binds more tightly than unary operators on its left",
            ),
        ),
    ),
    Excerpt(
        ("comparisons",),
        (
            Question(
                "comparison-priority",
                "Do all comparison operations have the same priority? Answer yes or no.",
                YES,
                "regex",
                "all comparison operations in Python have the same priority",
            ),
            Question(
                "unordered-types",
                "Which exception does an order comparison of unsupported types raise? Answer with its name.",
                "TypeError",
                "contains",
                'raises "TypeError"',
            ),
        ),
    ),
    Excerpt(
        ("assert", "raise", "exceptions"),
        (
            Question(
                "failed-assertion",
                "Which exception does a failed assertion raise? Answer with its name.",
                "AssertionError",
                "contains",
                "if not expression: raise AssertionError",
            ),
            Question(
                "bare-raise",
                "Does a raise statement without expressions re-raise the active exception? Answer yes or no.",
                YES,
                "regex",
                '"raise" re-raises the exception that is currently being handled',
            ),
        ),
    ),
)


def cut(text: str, chars: int) -> str:
    """The first paragraphs of a text, as many as fit into `chars` characters."""
    length = len(text)
    while length > chars:
        length = text.rfind("\n\n", 0, length)
        if length < 0:
            raise ValueError(f"--excerpt_chars {chars}: too few for the first paragraph; give more")
    return text[:length].strip()


def prompts(chars: int) -> list[dict[str, Any]]:
    """One row per question, in order.

    Raises:
        ValueError: this Python's reference lacks a topic or a passage, or the excerpt is cut before it.
    """
    rows = []
    for excerpt in EXCERPTS:
        missing = [name for name in excerpt.names if name not in topics]
        if missing:
            raise ValueError(f"pydoc_data.topics of Python {sys.version.split()[0]} has no topic {', '.join(missing)}")
        text = cut("\n\n".join(topics[name].strip() for name in excerpt.names), chars)
        for question in excerpt.questions:
            if question.evidence not in " ".join(text.split()):
                raise ValueError(
                    f"question {question.prompt_id}: {question.evidence!r} is not in the first {chars} characters of "
                    f"{', '.join(excerpt.names)}; give more --excerpt_chars"
                )
            rows.append(
                {
                    "prompt_id": question.prompt_id,
                    "messages": [{"role": "user", "content": f"{text}\n\n{question.text}"}],
                    "answer": question.answer,
                    "check": question.check,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the prompts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="prompts to write")
    parser.add_argument(
        "--excerpt_chars", type=int, default=5200, metavar="N", help="longest excerpt (3.7 characters are a token)"
    )
    options = parser.parse_args(arguments)
    try:
        rows = prompts(options.excerpt_chars)
    except ValueError as error:
        print(f"quickstart_prompts: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{options.out}: {len(rows)} prompts over {len(EXCERPTS)} excerpts of the Python reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
