"""The `branch:` section and the layout."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_branch.plan.limits import BranchConfig, Layout


@pytest.mark.parametrize(
    "values",
    [{"gradient": "approximate"}, {"chunk_tokens": 0}, {"pack_tokens": 0}, {"activations": "keep"}, {"chunks": 4}],
    ids=lambda values: next(iter(values)),
)
def test_values_out_of_range_are_refused_by_key(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        BranchConfig.model_validate(values)


def test_a_budget_goes_with_auto_and_with_nothing_else() -> None:
    with pytest.raises(ValidationError, match="branch.activations=auto needs branch.activation_budget_bytes"):
        BranchConfig(activations="auto")
    with pytest.raises(ValidationError, match="activation_budget_bytes=5 has no effect with branch.activations=retain"):
        BranchConfig(activations="retain", activation_budget_bytes=5)
    assert BranchConfig(activations="auto", activation_budget_bytes=0).activation_budget_bytes == 0


def test_the_pack_limit_never_exceeds_a_chunk() -> None:
    assert BranchConfig(pack_tokens=100).pack_limit == 100
    assert BranchConfig(pack_tokens=100, chunk_tokens=7).pack_limit == 7
    assert BranchConfig(pack_tokens=5, chunk_tokens=7).pack_limit == 5


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel.cp=0"):
        Layout(cp=0)
    with pytest.raises(ValueError, match="ZeRO-3.*pp=2"):
        Layout(pp=2, matched_passes=True)
