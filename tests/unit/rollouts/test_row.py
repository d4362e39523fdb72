"""Each rule of the format: what is accepted, and what the error says."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from megatron_branch.rollouts.columns import RowError, parse_row
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.row import PROVENANCE_FIELDS, rollout_from_row

GOOD: dict[str, Any] = {"group_id": "g", "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "reward": 0.5}
PARTS: dict[str, Any] = {"group_id": "g", "prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "reward": 0.5}
LEFT_OUT = object()
NAN, INF = math.nan, math.inf


def read(base: dict[str, Any], vocab_size: int | None = 10, **changes: Any) -> Rollout:
    row = {field: value for field, value in (base | changes).items() if value is not LEFT_OUT}
    parsed = parse_row(json.dumps(row).encode(), whole=PROVENANCE_FIELDS)
    return rollout_from_row(parsed, source="f.jsonl:3", vocab_size=vocab_size)


def test_a_full_row_keeps_everything() -> None:
    rollout = read(
        GOOD,
        logprobs=[None, 1, -0.25, 0.0],
        ref_logprobs=[-1, NAN, -2, -3],
        rollout_id=17,
        finish="length",
        text="words",
        metadata={"a": [1, {"b": None}]},
        attention_mask=[1, 1, 1, 1],
    )
    assert rollout.group_id == "g" and rollout.rollout_id == "17" and rollout.source == "f.jsonl:3"
    assert rollout.token_ids.dtype == np.int64 and rollout.token_ids.tolist() == [5, 6, 7, 8]
    assert rollout.loss_mask.dtype == np.bool_ and rollout.loss_mask.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(rollout.logprobs, [NAN, NAN, -0.25, 0.0])
    np.testing.assert_array_equal(rollout.ref_logprobs, [NAN, NAN, -2.0, -3.0])
    assert rollout.reward == 0.5 and rollout.advantage is None and rollout.prompt_length == 2
    assert rollout.finish == "length" and rollout.text == "words" and rollout.metadata == {"a": [1, {"b": None}]}
    for array in (rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.ref_logprobs):
        assert not array.flags.writeable


def test_defaults_of_a_short_row() -> None:
    rollout = read(GOOD, group_id=3)
    assert rollout.group_id == "3" and rollout.rollout_id == "f.jsonl:3" and rollout.provenance == ""
    assert rollout.logprobs is None and rollout.ref_logprobs is None and rollout.metadata == {}
    assert rollout.finish is None and rollout.text is None


@pytest.mark.parametrize(
    ("changes", "mask", "prompt_length"),
    [
        ({"loss_mask": LEFT_OUT, "prompt_length": 3}, [0, 0, 0, 1], 3),
        ({"loss_mask": LEFT_OUT, "prompt_length": 4}, [0, 0, 0, 0], 4),
        ({"loss_mask": LEFT_OUT, "prompt_length": 0}, [0, 1, 1, 1], 1),
        ({"loss_mask": [1, 1, 0, 1]}, [0, 1, 0, 1], 1),
        ({"loss_mask": [1, 0, 0, 0]}, [0, 0, 0, 0], 4),
        ({"prompt_length": 1}, [0, 0, 1, 1], 2),
        ({"loss_mask": [1, 1, 1, 1], "prompt_length": 1}, [0, 1, 1, 1], 1),
        ({"token_ids": [5], "loss_mask": [1]}, [0], 1),
    ],
    ids=["length", "empty response", "no prompt", "hole", "first only", "both agree", "both from start", "one token"],
)
def test_which_tokens_are_trained(changes: dict[str, Any], mask: list[int], prompt_length: int) -> None:
    rollout = read(GOOD, **changes)
    assert rollout.loss_mask.tolist() == [bool(bit) for bit in mask] and rollout.prompt_length == prompt_length


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({}, [0, 0, 1, 1, 1]),
        ({"completion_mask": [1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"loss_mask": [0, 0, 0, 0, 1]}, [0, 0, 0, 0, 1]),
        ({"token_ids": [5, 6, 7, 8, 9]}, [0, 0, 1, 1, 1]),
        ({"prompt_ids": [], "completion_ids": [5, 6, 7, 8, 9]}, [0, 1, 1, 1, 1]),
        ({"prompt_ids": [5, 6, 7, 8, 9], "completion_ids": [], "completion_mask": []}, [0, 0, 0, 0, 0]),
    ],
    ids=["plain", "completion mask", "whole mask", "ids too", "no prompt", "no completion"],
)
def test_prompt_and_completion_are_the_same_thing(changes: dict[str, Any], mask: list[int]) -> None:
    rollout = read(PARTS, **changes)
    assert rollout.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert rollout.loss_mask.tolist() == [bool(bit) for bit in mask]


def test_a_scalar_advantage_counts_for_every_trained_token() -> None:
    rollout = read(GOOD, advantage=-2, reward=LEFT_OUT)
    assert rollout.reward is None
    np.testing.assert_array_equal(rollout.advantage, [0.0, 0.0, -2.0, -2.0])
    assert not rollout.advantage.flags.writeable


def test_advantages_per_token_are_zero_where_not_trained() -> None:
    rollout = read(GOOD, advantage=[NAN, None, -1.5, 2], reward=None)
    np.testing.assert_array_equal(rollout.advantage, [0.0, 0.0, -1.5, 2.0])


@pytest.mark.parametrize("value", [0, -3, 1.25])
def test_any_finite_number_is_a_reward(value: float) -> None:
    assert read(GOOD, reward=value).reward == value


def test_ids_win_over_text() -> None:
    assert read(GOOD, prompt="hel", response="lo").token_ids.tolist() == [5, 6, 7, 8]


def test_provenance_is_canonical() -> None:
    assert read(GOOD, provenance="key").provenance == "key"
    one, other = read(GOOD, adapter="a", media_hash="m"), read(GOOD, media_hash="m", adapter="a")
    assert one.provenance == other.provenance != ""
    assert read(GOOD, routes={"a": 1, "b": 2}).provenance == read(GOOD, routes={"b": 2, "a": 1}).provenance
    distinct = [{"adapter": "a"}, {"adapter": "b"}, {"media_hash": "a"}, {"routes": [1, 2]}, {"routes": [[1], [2]]}]
    distinct += [{"routes": [1] * 500}, {"routes": [1] * 501}, {"adapter": "a", "provenance": "a"}, {"adapter": None}]
    keys = [read(GOOD, **fields).provenance for fields in distinct]
    assert len(set(keys)) == len(keys) and max(map(len, keys)) < 200 and keys[-1] == ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no group": ({"group_id": LEFT_OUT}, "^group_id is missing: .*add"),
    "group null": ({"group_id": None}, "^group_id = null: must be a string or an integer"),
    "group bool": ({"group_id": True}, "^group_id = true: must be a string or an integer"),
    "group empty": ({"group_id": ""}, '^group_id = "": must be a string or an integer'),
    "group float": ({"group_id": 1.5}, "^group_id = 1.5: must be"),
    "group list": ({"group_id": [1]}, "^group_id is a list of numbers: must be"),
    "rollout id list": ({"rollout_id": ["a"]}, r'^rollout_id = \["a"\]: must be'),
    "no ids": ({"token_ids": LEFT_OUT}, "^token_ids is missing: .*token ids"),
    "text only": ({"token_ids": LEFT_OUT, "text": "a"}, r"^token_ids is missing: text alone \(text\).*; write the ids"),
    "messages only": ({"token_ids": LEFT_OUT, "messages": [{"role": "user"}]}, r"text alone \(messages\)"),
    "empty ids": ({"token_ids": [], "loss_mask": []}, r"^token_ids = \[\]: .*at least one token"),
    "id negative": ({"token_ids": [5, -1, 7, 8]}, r"^token_ids\[1\] = -1: must be an integer >= 0"),
    "id too large": ({"token_ids": [5, 6, 7, 10]}, r"^token_ids\[3\] = 10: .*below the vocabulary size 10"),
    "id float": ({"token_ids": [5, 6.0, 7, 8]}, r"^token_ids\[1\] = 6.0: must be an integer"),
    "id null": ({"token_ids": [5, None, 7, 8]}, r"^token_ids\[1\] = null: must be an integer"),
    "id bool": ({"token_ids": [5, True, 7, 8]}, r"^token_ids\[1\] = true: must be an integer"),
    "id string": ({"token_ids": [5, "6", 7, 8]}, r"^token_ids = .*: must be a flat JSON list of numbers"),
    "ids nested": ({"token_ids": [[5, 6, 7, 8]]}, "^token_ids = .*: must be a flat JSON list of numbers"),
    "ids string": ({"token_ids": "5 6"}, '^token_ids = "5 6": must be a flat JSON list of numbers'),
    "ids differ from parts": ({"prompt_ids": [5, 6], "completion_ids": [7, 9]}, "^token_ids differs: must equal"),
    "no mask": ({"loss_mask": LEFT_OUT}, "^loss_mask is missing: .*prompt_length"),
    "mask short": ({"loss_mask": [0, 0, 1]}, "^loss_mask has 3 entries: .*token_ids, which has 4"),
    "mask long": ({"loss_mask": [0, 0, 1, 1, 1]}, "^loss_mask has 5 entries"),
    "mask two": ({"loss_mask": [0, 0, 1, 2]}, r"^loss_mask\[3\] = 2: must be 0 or 1"),
    "mask half": ({"loss_mask": [0, 0, 1, 0.5]}, r"^loss_mask\[3\] = 0.5: must be 0 or 1"),
    "mask null": ({"loss_mask": [None, 0, 1, 1]}, r"^loss_mask\[0\] = null: must be 0 or 1"),
    "mask number": ({"loss_mask": 1}, "^loss_mask = 1: must be a flat"),
    "prompt longer": ({"prompt_length": 5}, "^prompt_length = 5: .*0 to the number of tokens, 4"),
    "prompt negative": ({"loss_mask": LEFT_OUT, "prompt_length": -1}, "^prompt_length = -1: "),
    "prompt float": ({"loss_mask": LEFT_OUT, "prompt_length": 2.0}, "^prompt_length = 2.0: "),
    "prompt bool": ({"loss_mask": LEFT_OUT, "prompt_length": True}, "^prompt_length = true: "),
    "mask in prompt": ({"prompt_length": 3}, r"^loss_mask\[2\] = 1: must be 0 in the prompt"),
    "logprobs short": ({"logprobs": [None, None, -1]}, "^logprobs has 3 entries"),
    "logprob null": ({"logprobs": [0, 0, None, -1]}, r"^logprobs\[2\] is null or NaN: must be finite and <= 0"),
    "logprob nan": ({"logprobs": [0, 0, -1, NAN]}, r"^logprobs\[3\] is null or NaN"),
    "logprob positive": ({"logprobs": [0, 0, 1e-9, -1]}, r"^logprobs\[2\] = 1e-09: must be finite and <= 0"),
    "logprob infinite": ({"logprobs": [0, 0, -1, -INF]}, r"^logprobs\[3\] = -inf: must be finite"),
    "logprob string": ({"logprobs": [0, 0, "-1", -1]}, "^logprobs = .*flat JSON list"),
    "logprob bool": ({"logprobs": [False, 0, -1, -1]}, r"^logprobs\[0\] = false: must be a number or null"),
    "ref positive": ({"ref_logprobs": [0, 0, -1, 2]}, r"^ref_logprobs\[3\] = 2.0: must be finite and <= 0"),
    "no reward": ({"reward": LEFT_OUT}, "^reward is missing: .*reward or an advantage"),
    "reward null": ({"reward": None}, "^reward = null: .*reward or an advantage"),
    "reward bool": ({"reward": True}, "^reward = true: must be a finite number; write 1"),
    "reward string": ({"reward": "0.5"}, '^reward = "0.5": must be a finite number; remove the quotes'),
    "reward nan": ({"reward": NAN}, "^reward = NaN: must be a finite number"),
    "reward infinite": ({"reward": INF}, "^reward = Infinity: must be a finite number"),
    "reward vast": ({"reward": 10**400}, "^reward = 10+.*: must be a finite number"),
    "reward dict": ({"reward": {"acc": 1}}, '^reward = {"acc": 1}: must be a finite number'),
    "reward list": ({"reward": [0, 0, 1, 1]}, "^reward is a list of numbers: must be a finite number"),
    "bad reward beside advantage": ({"reward": "x", "advantage": 1}, '^reward = "x"'),
    "advantage nan": ({"advantage": NAN}, "^advantage = NaN: must be a finite number"),
    "advantage string": ({"advantage": "1"}, '^advantage = "1": must be'),
    "advantage short": ({"advantage": [1, 1]}, "^advantage has 2 entries"),
    "advantage null": ({"advantage": [0, 0, 1, None]}, r"^advantage\[3\] is null or NaN: must be finite"),
    "finish unknown": ({"finish": "eos"}, '^finish = "eos": must be stop, length or abort'),
    "text number": ({"text": 5}, "^text = 5: must be text"),
    "metadata list": ({"metadata": [1]}, "^metadata is a list of numbers: must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_row_names_field_value_rule_and_remedy(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(RowError, match=message) as caught:
        read(GOOD, **changes)
    assert str(caught.value).count("; ") >= 1 and "\n" not in str(caught.value)


REFUSED_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no completion": ({"completion_ids": LEFT_OUT}, "^completion_ids is missing"),
    "no prompt": ({"prompt_ids": LEFT_OUT}, "^prompt_ids is missing"),
    "both empty": ({"prompt_ids": [], "completion_ids": []}, r"^token_ids = \[\]"),
    "bad prompt id": ({"prompt_ids": [5, 99]}, r"^prompt_ids\[1\] = 99"),
    "bad completion id": ({"completion_ids": [99]}, r"^completion_ids\[0\] = 99"),
    "mask of the whole": ({"completion_mask": [0, 0, 1, 1, 1]}, "^completion_mask has 5 entries: .*completion_ids"),
    "prompt length differs": ({"prompt_length": 3}, "^prompt_length = 3: must be the length of prompt_ids, 2"),
    "logprobs of the completion": ({"logprobs": [-1, -1, -1]}, "^logprobs has 3 entries: .*which has 5"),
    "mask in prompt": (
        {"loss_mask": [0, 1, 1, 1, 1]},
        r"^loss_mask\[1\] = 1: must be 0 in the prompt, which prompt_ids",
    ),
}


@pytest.mark.parametrize("name", REFUSED_PARTS)
def test_a_bad_row_in_two_parts_is_refused(name: str) -> None:
    changes, message = REFUSED_PARTS[name]
    with pytest.raises(RowError, match=message):
        read(PARTS, **changes)


def test_the_vocabulary_may_be_unknown() -> None:
    assert read(GOOD, vocab_size=None, token_ids=[5, 6, 7, 10**9]).token_ids[3] == 10**9
