from __future__ import annotations

import pytest

from megatron_branch.tracking.timers import Timers


class _Device:
    """A clock whose `sync` lets outstanding work pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = 0.0

    def sync(self) -> None:
        self.now += self.pending
        self.pending = 0.0


def test_phases_add_up_nest_and_start_again() -> None:
    device = _Device()
    timers = Timers(clock=lambda: device.now)
    with timers("step"):
        for seconds in (1.0, 2.0):
            with timers("capture"):
                device.now += seconds
        device.now += 4.0
    assert timers.take() == {"timing_s/capture": 3.0, "timing_s/step": 7.0}
    assert timers.take() == {}


def test_device_work_counts_in_the_phase_that_started_it() -> None:
    device = _Device()
    timers = Timers(device.sync, clock=lambda: device.now)
    device.pending = 5.0
    with timers("tail"):
        device.pending = 2.0
    with timers("replay"):
        pass
    assert timers.take() == {"timing_s/tail": 2.0, "timing_s/replay": 0.0}


def test_a_phase_that_raises_is_counted_and_closed() -> None:
    device = _Device()
    timers = Timers(clock=lambda: device.now)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), timers("plan"):
            device.now += 1.0
            raise ZeroDivisionError
    assert timers.take() == {"timing_s/plan": 2.0}


def test_only_declared_phases_and_none_in_itself() -> None:
    timers = Timers()
    with pytest.raises(AssertionError, match="not declared"), timers("captures"):
        pass
    with timers("tail"), pytest.raises(AssertionError, match="already"), timers("tail"):
        pass
