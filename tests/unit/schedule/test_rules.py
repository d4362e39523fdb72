"""A broken order is caught by the rule that it breaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import depth_first, match_passes, pipeline_orders, scoring_orders
from megatron_branch.schedule.render import text
from megatron_branch.schedule.rules import assert_matched, assert_valid
from tests.branching import planned, prompt_with_tails, rollout


def units_of(**config: object) -> tuple[Unit, ...]:
    plan, _ = planned(
        prompt_with_tails(9, [4, 4, 4]), config=BranchConfig.model_validate({"chunk_tokens": 4, **config})
    )
    return plan.ranks[0].units


def moved(order: tuple[Action, ...], source: int, target: int) -> tuple[Action, ...]:
    slots = list(order)
    slots.insert(target, slots.pop(source))
    return tuple(slots)


def test_a_tail_after_the_replay_of_its_prefix_is_named() -> None:
    units = units_of()
    order = depth_first(units)
    assert text(order, units) == "C0.0 C0.1 T0.0 T0.1 T0.2 R0.1 R0.0"
    with pytest.raises(AssertionError, match=r"T0.2 at slot 5 is outside its prefix window C0.1@1 .. R0.1@4"):
        assert_valid([moved(order, 5, 4)], units)
    with pytest.raises(AssertionError, match=r"T0.0 at slot 1 is outside its prefix window C0.1@2 .. R0.1@5"):
        assert_valid([moved(order, 2, 1)], units)
    with pytest.raises(AssertionError, match=r"R0.1 at slot 6 is outside its prefix window C0.0@0 .. R0.0@5"):
        assert_valid([moved(order, 6, 5)], units)


def test_a_reader_before_a_capture_that_is_never_replayed_is_named() -> None:
    units = units_of(gradient="detached")
    with pytest.raises(AssertionError, match=r"T0.0 at slot 1 is outside its prefix window C0.1@2 .. end"):
        assert_valid([moved(depth_first(units), 2, 1)], units)


def test_a_missing_or_repeated_slot_is_named() -> None:
    units = units_of()
    order = depth_first(units)
    with pytest.raises(AssertionError, match=r"R0.0 \(both\) has 0 slots instead of 1"):
        assert_valid([order[:-1]], units)
    with pytest.raises(AssertionError, match=r"T0.1 \(both\) has 2 slots instead of 1"):
        assert_valid([(*order[:3], order[3], *order[3:])], units)
    with pytest.raises(AssertionError, match=r"T0.0 \(both\) has 1 slots instead of 0"):
        assert_valid([order], units, scoring=True)
    with pytest.raises(AssertionError, match=r"tail of unit 9, there are 5"):
        assert_valid([(*order, Action("tail", 9, "both"))], units)


def test_a_backward_before_its_forward_is_named() -> None:
    units = units_of()
    first, last = pipeline_orders(units, 2)
    swap = list(first)
    forward, backward = first.index(Action("tail", 2, "forward")), first.index(Action("tail", 2, "backward"))
    swap[forward], swap[backward] = swap[backward], swap[forward]
    with pytest.raises(AssertionError, match=rf"stage 0: T0.0< at slot {forward} stands before its forward"):
        assert_valid([tuple(swap), last], units)


def test_a_replay_before_its_capture_is_named() -> None:
    units = units_of()
    order = depth_first(units)
    with pytest.raises(AssertionError, match=r"outside its prefix window|stands before its forward"):
        assert_valid([moved(order, 6, 0)], units)


def test_links_in_different_orders_are_named() -> None:
    units = units_of()
    first, last = pipeline_orders(units, 2)
    swap = list(last)
    swap[2], swap[3] = swap[3], swap[2]
    with pytest.raises(AssertionError, match="forward message 2 of the link is T0.0> on stage 0, T0.1 on stage 1"):
        assert_valid([first, tuple(swap)], units)
    tails = [slot for slot, action in enumerate(first) if action.phase == "backward"]
    swap = list(first)
    swap[tails[1]], swap[tails[2]] = swap[tails[2]], swap[tails[1]]
    with pytest.raises(AssertionError, match="backward message 1 of the link is T0.2< on stage 0, T0.1 on stage 1"):
        assert_valid([tuple(swap), last], units)


def test_too_many_tails_in_flight_are_named() -> None:
    units = units_of()
    first, last = pipeline_orders(units, 2)
    assert text(first, units) == "C0.0 C0.1 T0.0> T0.1> T0.0< T0.2> T0.1< T0.2< R0.1 R0.0"
    with pytest.raises(AssertionError, match="stage 0: T0.2> at slot 4 makes 3 tails in flight, 2 are allowed"):
        assert_valid([moved(first, 5, 4), last], units)


def test_too_much_state_is_named() -> None:
    plan, _ = planned([rollout([tree, 1, 2, 3, tail], [4]) for tree in (7, 8) for tail in (4, 5)])
    units = plan.ranks[0].units
    order = depth_first(units)
    assert text(order, units) == "C0:0.0 T0:0.0 R0:0.0 C1:0.0 T1:0.0 R1:0.0"
    with pytest.raises(AssertionError, match="holds the state of 6 tokens, the longest path has 3"):
        assert_valid([moved(order, 3, 1)], units)


def test_stages_that_wait_for_each_other_are_named() -> None:
    """Stage 0 wants the gradient of the first tail before it sends the second; stage 1 wants both tails first."""
    units = units_of(pack_tokens=1)
    first, middle, last = pipeline_orders(units, 3)
    assert text(first, units) == "C0.0 C0.1 T0.0> T0.1> T0.2> T0.0< T0.1< T0.2< R0.1 R0.0"
    assert text(middle, units) == "C0.0 C0.1 T0.0> T0.1> T0.0< T0.2> T0.1< T0.2< R0.1 R0.0"
    waits = moved(moved(first, 5, 3), 6, 5)
    assert text(waits, units) == "C0.0 C0.1 T0.0> T0.0< T0.1> T0.1< T0.2> T0.2< R0.1 R0.0"
    with pytest.raises(AssertionError, match="stage 0 waits forever at slot 3, T0.0<"):
        assert_valid([waits, middle, last], units)


def test_idles_may_stand_anywhere_but_must_be_passes() -> None:
    units = units_of()
    order = depth_first(units)
    assert_valid([(Action("idle", -1, "forward"), *order[:3], Action("idle", -1, "both"), *order[3:])], units)
    with pytest.raises(AssertionError, match="is no idle pass"):
        assert_valid([(*order, Action("idle", -1, "backward"))], units)


@pytest.mark.parametrize("stages", [1, 2, 4])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_dropped_or_repeated_slot_is_caught(stages: int, data: st.DataObject) -> None:
    units = units_of()
    scoring = data.draw(st.booleans())
    orders = list(scoring_orders(units, stages) if scoring else pipeline_orders(units, stages))
    stage = data.draw(st.integers(0, stages - 1))
    slot = data.draw(st.integers(0, len(orders[stage]) - 1))
    copies = data.draw(st.sampled_from([0, 2]))
    orders[stage] = orders[stage][:slot] + orders[stage][slot : slot + 1] * copies + orders[stage][slot + 1 :]
    with pytest.raises(AssertionError, match="slots instead of"):
        assert_valid(orders, units, scoring=scoring)


def test_unequal_passes_over_ranks_are_named() -> None:
    units = units_of()
    orders = match_passes([depth_first(units), depth_first(units)[:2]])
    assert_matched(orders)
    with pytest.raises(AssertionError, match="rank 1 has 6 slots, rank 0 has 7"):
        assert_matched([orders[0], orders[1][:-1]])
    with pytest.raises(AssertionError, match="slot 3 is a forward pass on rank 1, a both pass on rank 0"):
        assert_matched([orders[0], (*orders[1][:3], Action("idle", -1, "forward"), *orders[1][4:])])
