"""Orders in simulated time."""

from __future__ import annotations

import pytest

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.orders import depth_first, match_passes, pipeline_orders, scoring_orders
from megatron_branch.schedule.simulate import recorded, simulate
from tests.branching import planned, prompt_with_tails


def units_of() -> tuple[Unit, ...]:
    plan, _ = planned(prompt_with_tails(9, [4, 4]), config=BranchConfig(chunk_tokens=4))
    return plan.ranks[0].units


def test_one_stage_has_no_bubble() -> None:
    units = units_of()
    simulation = simulate([depth_first(units)], units)
    assert simulation.makespan == 2 * 4 + 2 * 12 + 2 * 12
    assert simulation.bubble_fraction == 0
    assert simulation.peak_state_tokens == (8,)
    assert [(span.start, span.end) for span in simulation.spans[:3]] == [(0, 4), (4, 8), (8, 20)]


def test_two_stages_wait_for_each_other_by_hand() -> None:
    """Forward 4, backward 8, tail and replay 12.

    stage 0: C 0-4, C 4-8, T> 8-12, T> 12-16, T< 24-32 (stage 1 is done with it at 24), T< 36-44, R 48-60, R 60-72
    stage 1: C 4-8, C 8-12, T 12-24, T 24-36, R 36-48, R 48-60
    """
    units = units_of()
    simulation = simulate(pipeline_orders(units, 2), units)
    times = {(span.stage, span.name): (span.start, span.end) for span in simulation.spans}
    assert times[0, "T0.0<"] == (24, 32)
    assert times[0, "T0.1<"] == (36, 44)
    assert times[0, "R0.0"] == (60, 72)
    assert times[1, "T0.0"] == (12, 24)
    assert simulation.makespan == 72
    assert simulation.busy == (56, 56)
    assert simulation.bubble_fraction == pytest.approx(1 - 56 / 72)


def test_an_idle_stage_and_an_empty_rank_are_simulated() -> None:
    units = units_of()
    _, idle = match_passes([depth_first(units), ()])
    assert simulate([idle], ()).makespan == 0
    assert simulate([(), ()], ()).bubble_fraction == 0


def test_scoring_holds_state_until_its_last_reader() -> None:
    units = units_of()
    simulation = simulate(scoring_orders(units, 2), units)
    assert simulation.makespan == 5 * 4
    assert simulation.peak_state_tokens == (8, 8)


def test_orders_that_wait_for_each_other_are_named() -> None:
    units = units_of()
    first, last = pipeline_orders(units, 2)
    with pytest.raises(AssertionError, match=r"stage 0 waits forever at slot 3, T0.0<"):
        simulate([(*first[:3], first[4], first[3], *first[5:]), (last[0], last[1], last[3], *last[2:3])], units)


def test_a_recorded_run_has_the_times_that_were_measured() -> None:
    units = units_of()
    order = depth_first(units)
    times = [(float(slot), slot + 0.75) for slot in range(len(order))]
    run = recorded([order], units, [times])
    assert [(span.start, span.end, span.action) for span in run.spans] == [
        (start, end, action) for (start, end), action in zip(times, order, strict=True)
    ]
    assert run.makespan == len(order) - 0.25 and run.busy == (0.75 * len(order),)
    with pytest.raises(ValueError, match="zip"):
        recorded([order], units, [times[1:]])
