from __future__ import annotations

import pytest

from megatron_branch.tracking.timers import Timers


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0


def test_phases_add_up_nest_and_start_again() -> None:
    clock = _Clock()
    timers = Timers(lambda: clock.now)
    with timers("step"):
        for seconds in (1.0, 2.0):
            with timers("capture"):
                clock.now += seconds
        clock.now += 4.0
    assert timers.take() == {"timing_s/capture": 3.0, "timing_s/step": 7.0}
    assert timers.take() == {}


def test_marks_are_read_only_when_the_step_is_over() -> None:
    read: list[tuple[int, int]] = []
    marks = iter(range(10))

    def seconds(start: int, end: int) -> float:
        read.append((start, end))
        return float(end - start)

    timers = Timers(lambda: next(marks), seconds=seconds)
    with timers("tail"):
        pass
    with timers("replay"):
        pass
    assert read == []
    assert timers.take() == {"timing_s/tail": 1.0, "timing_s/replay": 1.0}
    assert read == [(0, 1), (2, 3)]


def test_a_phase_that_raises_is_counted_and_closed() -> None:
    clock = _Clock()
    timers = Timers(lambda: clock.now)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), timers("plan"):
            clock.now += 1.0
            raise ZeroDivisionError
    assert timers.take() == {"timing_s/plan": 2.0}


def test_only_declared_phases_and_none_in_itself() -> None:
    timers = Timers()
    with pytest.raises(AssertionError, match="not declared"), timers("captures"):
        pass
    with timers("tail"), pytest.raises(AssertionError, match="already"), timers("tail"):
        pass


def test_spans_are_in_order_and_count_from_the_step() -> None:
    clock = _Clock()
    timers = Timers(lambda: clock.now)
    clock.now = 10.0
    with timers("step"):
        for phase, seconds in (("capture", 1.0), ("tail", 2.0), ("capture", 4.0)):
            clock.now += 0.5
            with timers(phase):
                clock.now += seconds
    assert timers.spans(("capture", "tail"), since="step") == [(0.5, 1.5), (2.0, 4.0), (4.5, 8.5)]
    assert timers.spans(("replay",), since="step") == []
