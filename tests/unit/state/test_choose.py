"""`auto` moves the fewest bytes that the budget allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_branch.plan.activations import ActivationSizes
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.schedule.orders import depth_first
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.choose import choose_placement
from megatron_branch.state.config import StateConfig
from megatron_branch.state.placement import Placement
from megatron_branch.state.predict import Seat, StateSizes, predict_moves, predict_state
from tests.branching import planned, prompt_with_tails

SIZES = StateSizes(
    kv=64, adjoint=128, stage_input=8, activations=ActivationSizes(1, 0, 0), layers=8, last_stage=True, sequence=1,
    replicas=1,
)  # fmt: skip
PLAN, _ = planned(prompt_with_tails(40, [5, 6, 7]), config=BranchConfig(chunk_tokens=8, pack_tokens=1))
UNITS = PLAN.ranks[0].units
ORDER = depth_first(UNITS)


def predicted(placement: Placement) -> ByteCount:
    return predict_state(ORDER, UNITS, SIZES, seat=Seat(), placement=placement)


def chosen(budget: int, host: int | None = None, **keys: Any) -> Placement:
    config = StateConfig(placement="auto", device_budget_bytes=budget, **keys)
    return choose_placement(config, ORDER, UNITS, SIZES, seat=Seat(), host_room_bytes=host)


def test_budgets_that_only_these_fit_are_met_with_the_fewest_kinds_elsewhere() -> None:
    steps = [Placement(), Placement(stage_input="host"), Placement(adjoint="host"), Placement(adjoint="host")]
    steps[3:] = [Placement(adjoint="host", stage_input="host"), Placement.everything("host")]
    peaks = [predicted(placement).peak_at["device"] for placement in steps]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert [chosen(peak) for peak in peaks] == steps


def test_per_byte_a_stage_input_moves_least_and_keys_and_values_most() -> None:
    moved, peak = predict_moves(ORDER, UNITS, SIZES, seat=Seat()), predicted(Placement()).peak
    rates = [moved[kind] / peak[kind] for kind in ("stage_input", "adjoint", "state")]
    assert rates == sorted(rates) and rates[0] == 2


def test_what_fits_nowhere_is_refused_with_the_numbers() -> None:
    least = predicted(Placement.everything("host")).peak_at["device"]
    with pytest.raises(ValueError, match=rf"state\.device_budget_bytes=10: no placement fits.* {least} bytes"):
        chosen(10)


def test_files_take_what_the_host_has_no_room_for(tmp_path: Path) -> None:
    least = predicted(Placement.everything("host")).peak_at["device"]
    room = predicted(Placement.everything("host")).peak_at["host"] - 1
    placement = chosen(least, room, nvme_path=tmp_path)
    assert "nvme" in placement.places.values() and predicted(placement).peak_at["host"] <= room
    with pytest.raises(ValueError, match="bytes are free in host memory"):
        chosen(least, room)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"placement": "nvme"}, "state.placement=nvme needs state.nvme_path"),
        ({"placement": "auto"}, "state.placement=auto needs state.device_budget_bytes"),
        ({"placement": "host", "nvme_path": "x"}, "state.nvme_path=x has no effect with state.placement=host"),
        ({"device_budget_bytes": 1}, "state.device_budget_bytes=1 has no effect with state.placement=device"),
    ],
)
def test_every_setting_has_an_effect(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StateConfig(**keys)
