"""Orders of one stage, of pipelines, of scoring, and over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import (
    depth_first,
    longest_path_tokens,
    match_passes,
    pipeline_orders,
    releases,
    scoring_orders,
)
from megatron_branch.schedule.render import text
from megatron_branch.schedule.rules import assert_matched, assert_valid
from megatron_branch.schedule.simulate import simulate
from tests.branching import CONFIGS, planned, prompt_with_tails, rollout, steps


def units_of(rows: Sequence[Rollout], **config: object) -> tuple[Unit, ...]:
    plan, _ = planned(rows, config=BranchConfig.model_validate(config))
    return plan.ranks[0].units


NESTED = [
    rollout([0, 1, 2, 3, 4, 5], [4, 5]),
    rollout([0, 1, 2, 3, 6], [4]),
    rollout([0, 1, 7], [2]),
    rollout([9, 9, 9], [2]),
]


def test_depth_first_captures_down_and_replays_up() -> None:
    units = units_of(prompt_with_tails(9, [3, 2]), chunk_tokens=4)
    assert text(depth_first(units), units) == "C0.0 C0.1 T0.0 T0.1 R0.1 R0.0"


def test_depth_first_closes_a_subtree_before_the_next_tree() -> None:
    units = units_of(NESTED)
    assert text(depth_first(units), units) == "C0:0.0 T0:0.0 C0:1.0 T0:1.0 R0:1.0 R0:0.0 T1:0.0"


def test_constant_prefixes_are_never_replayed() -> None:
    units = units_of([rollout([0, 1, 2, 3, 4], [2, 4]), rollout([0, 1, 2, 3, 5, 6], [5])], gradient="detached")
    order = depth_first(units)
    assert text(order, units) == "C0.0 C0.1 T0.0 R0.1"
    assert releases(order, units) == ((), (), (), (1, 0))


def test_state_is_released_after_its_replay_or_its_last_reader() -> None:
    rows = prompt_with_tails(9, [3, 2])
    units = units_of(rows, chunk_tokens=4)
    assert releases(depth_first(units), units) == ((), (), (), (), (1,), (0,))
    constant = units_of(rows, chunk_tokens=4, gradient="detached")
    first_stage, _ = pipeline_orders(constant, 2)
    assert text(first_stage, constant) == "C0.0 C0.1 T0.0> T0.1> T0.0< T0.1<"
    assert releases(first_stage, constant) == ((), (), (), (), (), (1, 0))
    (scoring,) = scoring_orders(units, 1)
    assert text(scoring, units) == "C0.0 C0.1 T0.0> T0.1>"
    assert releases(scoring, units) == ((), (), (), (1, 0))


def test_a_pipeline_runs_backward_first_with_few_tails_in_flight() -> None:
    units = units_of(prompt_with_tails(9, [4, 4, 4, 4]), chunk_tokens=4)
    orders = pipeline_orders(units, 3)
    assert [text(order, units) for order in orders] == [
        "C0.0 C0.1 T0.0> T0.1> T0.2> T0.0< T0.3> T0.1< T0.2< T0.3< R0.1 R0.0",
        "C0.0 C0.1 T0.0> T0.1> T0.0< T0.2> T0.1< T0.3> T0.2< T0.3< R0.1 R0.0",
        "C0.0 C0.1 T0.0 T0.1 T0.2 T0.3 R0.1 R0.0",
    ]


def two_tails(first: int, prompt: int) -> list[Rollout]:
    return [rollout([first, *range(prompt - 1), tail], [prompt]) for tail in (20, 21)]


def test_captures_of_the_next_tree_fill_the_bubble() -> None:
    units = units_of([*two_tails(30, 3), *two_tails(40, 3), *two_tails(50, 12)], pack_tokens=1)
    first, last = pipeline_orders(units, 2)
    assert text(first, units).startswith("C0:0.0 T0:0.0> T0:0.1> C1:0.0 T0:0.0< T1:0.0> T0:0.1< T1:0.1> R0:0.0")
    assert text(last, units).startswith("C0:0.0 T0:0.0 T0:0.1 R0:0.0 C1:0.0")


def test_captures_of_the_next_tree_wait_until_their_state_fits() -> None:
    units = units_of([*two_tails(30, 3), *two_tails(50, 12)], pack_tokens=1)
    first, _ = pipeline_orders(units, 2)
    assert longest_path_tokens(units) == 11
    assert text(first, units).startswith("C0:0.0 T0:0.0> T0:0.1> T0:0.0< T0:0.1< R0:0.0 C1:0.0")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@given(rows=steps(), config=CONFIGS, late=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_any_plan_is_ordered_validly(stages: int, rows: list[Rollout], config: BranchConfig, late: int) -> None:
    """Also with durations that have nothing to do with tokens."""
    plan, _ = planned(rows, config=config)
    units = plan.ranks[0].units
    orders = pipeline_orders(units, stages)
    assert_valid(orders, units)
    assert orders[-1] == depth_first(units)
    assert_valid(pipeline_orders(units, stages, duration=lambda a, s: 1 + (7 * a.unit + 5 * s) % late), units)
    assert_valid(scoring_orders(units, stages), units, scoring=True)


def test_a_pipeline_of_equal_chunks_loses_only_its_ramps() -> None:
    """Chunks of 4 tokens, forward 4, tail 12, replay 12: the last stage starts after one forward per earlier stage and
    the first ends one replay per later stage after it, so 3 * (4 + 12) is all that four stages may lose."""
    units = units_of(prompt_with_tails(33, [4] * 8), chunk_tokens=4)
    (serial,) = simulate(pipeline_orders(units, 1), units).busy
    assert simulate(pipeline_orders(units, 4), units).makespan == serial + 3 * (4 + 12)


def test_without_units_every_stage_has_nothing_to_do() -> None:
    assert pipeline_orders((), 3) == ((), (), ())
    assert longest_path_tokens(()) == 0
    assert scoring_orders((), 2) == ((), ())


def passes(kinds: str) -> tuple[Action, ...]:
    """An order of captures (f) and tails (b), unit numbers counting up."""
    return tuple(
        Action("capture", unit, "forward") if kind == "f" else Action("tail", unit, "both")
        for unit, kind in enumerate(kinds)
    )


def shown(orders: Sequence[Sequence[Action]]) -> list[str]:
    letters = {"forward": "f", "both": "b"}
    return ["".join(letters[a.phase].upper() if a.kind == "idle" else letters[a.phase] for a in o) for o in orders]


def test_matching_pads_with_idles_of_the_same_kind() -> None:
    assert shown(match_passes([passes("fbb"), passes("fbbbbbb")])) == ["fbbBBBB", "fbbbbbb"]
    assert shown(match_passes([passes("ffbb"), passes("fbb")])) == ["ffbb", "fFbb"]
    assert shown(match_passes([passes("b"), passes("fb")])) == ["Fb", "fb"]
    assert shown(match_passes([passes("bbbf"), passes("f")])) == ["bbbf", "BBBf"]
    assert shown(match_passes([(), passes("fb")])) == ["FB", "fb"]
    assert shown(match_passes([passes("ff"), passes("f")])) == ["ff", "fF"]
    assert match_passes([(), ()]) == ((), ())


def shortest_common(left: str, right: str) -> int:
    """Length of the shortest common supersequence."""
    best = {(i, 0): i for i in range(len(left) + 1)} | {(0, j): j for j in range(len(right) + 1)}
    for i, j in product(range(1, len(left) + 1), range(1, len(right) + 1)):
        same = left[i - 1] == right[j - 1]
        best[i, j] = 1 + (best[i - 1, j - 1] if same else min(best[i - 1, j], best[i, j - 1]))
    return best[len(left), len(right)]


@given(st.lists(st.text(alphabet="fb", max_size=12), min_size=1, max_size=5))
def test_matched_orders_keep_every_action_in_order(ranks: list[str]) -> None:
    orders = [passes(kinds) for kinds in ranks]
    matched = match_passes(orders)
    assert_matched(matched)
    for order, padded in zip(orders, matched, strict=True):
        assert tuple(action for action in padded if action.kind != "idle") == order
    slots = len(matched[0])
    assert max(map(len, ranks)) <= slots <= sum(map(len, ranks))


@given(steps(), steps())
@settings(max_examples=50, deadline=None)
def test_matching_two_ranks_is_close_to_the_shortest(left: list[Rollout], right: list[Rollout]) -> None:
    orders = [depth_first(units_of(rows, chunk_tokens=3, pack_tokens=3)) for rows in (left, right)]
    kinds = ["".join(action.phase[0] for action in order) for order in orders]
    # Majority merge is a heuristic: from a quarter more than the optimum on, padding would cost a pass in four.
    assert len(match_passes(orders)[0]) <= 1.25 * shortest_common(*kinds) + 1
