"""Denominators of the step."""

from __future__ import annotations

import pytest

from megatron_branch.plan.plan import Aggregation
from megatron_branch.plan.weights import row_weights
from tests.branching import planned, prompt_with_tails, rollout


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 / 5, 0.0, 1 / 5)),
        ("seq-mean-token-sum", (1 / 2, 0.0, 1 / 2)),
        ("seq-mean-token-mean", (1 / 2, 0.0, 1 / 8)),
    ],
)
def test_weights_of_rows_of_1_0_and_4_trained_tokens(aggregation: Aggregation, expected: tuple[float, ...]) -> None:
    rows = [rollout([0, 1, 2], [1]), rollout([0, 1], []), rollout(range(6), [1, 2, 4, 5])]
    assert row_weights(rows, aggregation) == expected


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_weights_do_not_depend_on_ranks(aggregation: Aggregation) -> None:
    rows = [*prompt_with_tails(3, [2, 8]), rollout([9, 9, 9], [1, 2])]
    one, _ = planned(rows, aggregation=aggregation)
    two, _ = planned(rows, aggregation=aggregation, dp=2)
    assert one.row_weights == two.row_weights


def test_a_step_without_a_trained_token_is_refused_with_its_source() -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1.*loss_mask"):
        row_weights([rollout([0, 1], []), rollout([3], [])], "token-mean")
    with pytest.raises(ValueError, match="0 rollouts"):
        row_weights([], "token-mean")
