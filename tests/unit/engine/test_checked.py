"""What is refused before ranks meet: when gradients can be reduced."""

from typing import Any

import pytest

from megatron_branch.config import make_config
from megatron_branch.engine.checked import check_reduction

REFUSED = {
    "whole gradients": ({"zero": {"stage": 1}}, 2, r"zero\.stage=1.*set zero\.stage to 2 or 3"),
    "stages with different passes": ({"parallel": {"pp": 2}}, 4, r"parallel\.pp=2 and parallel\.dp=2.*parallel\.dp=1"),
    "retained chunks": ({"branch": {"activations": "retain"}}, 2, r"activations=retain and parallel\.dp=2.*recompute"),
}


def check(sections: dict[str, Any], world_size: int, reduce: str = "pass") -> None:
    zero = {"stage": 2, "reduce": reduce, **sections.pop("zero", {})}
    values = {"model": {"path": "m"}, "data": {"rollouts": "r"}, "zero": zero, **sections}
    check_reduction(make_config(values), world_size)


@pytest.mark.parametrize(("sections", "world_size", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_reduced_in_every_pass(sections: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"zero\.reduce=pass with .*{message}"):
        check({**sections}, world_size)
    check({**sections}, world_size, "step")


def test_one_data_parallel_rank_may_have_stages_and_retain() -> None:
    check({"parallel": {"pp": 2, "cp": 2}, "branch": {"activations": "retain"}}, 4)
    check({}, 4)
