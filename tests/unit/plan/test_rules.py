"""A broken plan is caught by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Plan, Segment, Unit
from megatron_branch.plan.rules import assert_always_true
from tests.branching import drawn, planned, rollout

ROWS = [
    rollout([0, 1, 2, 3, 4, 5], [4, 5]),
    rollout([0, 1, 2, 3, 6], [4]),
    rollout([0, 1, 7, 7], [2, 3]),
    rollout([0, 1, 8], [2]),
    rollout([9, 9], [1]),
]


def with_units(plan: Plan, change: Callable[[list[Unit]], object]) -> Plan:
    units = list(plan.ranks[0].units)
    change(units)
    return replace(plan, ranks=(replace(plan.ranks[0], units=tuple(units)),))


def set_unit(place: int, **fields: object) -> Callable[[Plan], Plan]:
    def change(units: list[Unit]) -> None:
        units[place] = replace(units[place], **fields)  # type: ignore[arg-type]

    return lambda plan: with_units(plan, change)


def swap(units: list[Unit]) -> None:
    units[0], units[1] = replace(units[1], index=0), replace(units[0], index=1)


def drop_segment(units: list[Unit]) -> None:
    units[1] = replace(units[1], segments=units[1].segments[1:])


MUTATIONS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "an input left out": (set_unit(3, segments=(Segment(2, 3, 4), Segment(3, 3, 4))), "computed to 4, not 5"),
    "an input twice": (set_unit(2, segments=(Segment(1, 0, 3),)), "outside its node's inputs"),
    "a segment left out": (lambda plan: with_units(plan, drop_segment), "computed to"),
    "a context left out": (set_unit(3, context=(0,)), "starts at 3, but its context ends at 1"),
    "a foreign context": (set_unit(3, context=(0, 0)), "jumps"),
    "a later context": (set_unit(0, context=(2,)), "not earlier"),
    "a context of a tail": (set_unit(2, context=(1,)), "reads tail of tree 0"),
    "units swapped": (lambda plan: with_units(plan, swap), "reads unit 0, which is not earlier"),
    "an index wrong": (set_unit(3, index=2), "at place 3"),
    "a label twice": (set_unit(2, label="0.0"), "one label"),
    "a tree on no rank": (lambda plan: with_units(plan, lambda units: units.pop()), "run through trees"),
    "a prefix not replayed": (set_unit(0, replayed=False), "replayed=False"),
    "a tail replayed": (set_unit(1, replayed=True), "replayed=True"),
    "loss not seen": (set_unit(1, trained=False), "trained=False"),
    "a wrong weight": (lambda plan: replace(plan, row_weights=(*plan.row_weights[:-1], 0.2)), "weights"),
    "a weight short": (lambda plan: replace(plan, row_weights=plan.row_weights[:-1]), "4 weights for 5 rows"),
    "executed tokens": (lambda plan: replace(plan, executed_tokens=1), "executed_tokens is 1"),
    "loss tokens": (lambda plan: replace(plan, loss_tokens=8), "loss_tokens is 8"),
    "trained tokens": (lambda plan: replace(plan, trained_tokens=8), "trained_tokens is 8"),
    "logical tokens": (lambda plan: replace(plan, logical_tokens=99), "logical_tokens is 99"),
    "a tree on two ranks": (lambda plan: replace(plan, ranks=plan.ranks * 2), "computed to"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_plan_is_caught(name: str) -> None:
    plan, trees = planned(ROWS)
    assert drawn(plan.ranks[0].units) == ["C0.0[0:1]", "T0.0[1:3,1:2]", "C1.0[1:3]", "T1.0[3:5,3:4]", "T0.0[0:1]"]
    mutate, message = MUTATIONS[name]
    with pytest.raises(AssertionError, match=message):
        assert_always_true(mutate(plan), trees, ROWS)


def test_a_detached_plan_that_mixes_or_replays_wrongly_is_caught() -> None:
    rows = [rollout(range(8), [5, 7])]
    plan, trees = planned(rows, config=BranchConfig(gradient="detached"))
    assert drawn(plan.ranks[0].units) == ["c0.0[0:4]", "T0.0[4:7]"]
    with pytest.raises(AssertionError, match="replayed=True"):
        assert_always_true(set_unit(0, replayed=True)(plan), trees, rows)

    def shift(units: list[Unit]) -> None:
        units[0] = replace(units[0], segments=(Segment(0, 0, 3),))
        units[1] = replace(units[1], segments=(Segment(0, 3, 7),))

    with pytest.raises(AssertionError, match="mixes"):
        assert_always_true(with_units(plan, shift), trees, rows)


def test_weights_are_checked_in_every_mode() -> None:
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        plan, trees = planned(ROWS, aggregation=aggregation)  # type: ignore[arg-type]
        for other in {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean"} - {aggregation}:
            with pytest.raises(AssertionError, match="weights"):
                assert_always_true(replace(plan, aggregation=other), trees, ROWS)
