"""The settings of the data."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_branch.rollouts.config import DataConfig


@pytest.mark.parametrize(
    "changes",
    [
        {"groups_per_step": 0},
        {"epochs": 0},
        {"seed": -1},
        {"on_bad_row": "ignore"},
        {"max_tokens": 0},
        {"shufle": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_out_of_range_and_unknown_keys_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        DataConfig(rollouts="f.jsonl", **changes)


def test_it_is_frozen_and_every_field_is_described() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        DataConfig(rollouts="f.jsonl").seed = 1
    assert all(field.description for field in DataConfig.model_fields.values())
