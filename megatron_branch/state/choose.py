"""Which placement a rank uses in a step.

`auto` takes, of all ways to place the three kinds, the one with the least time in copies among those that fit. A kind
that is kept away costs, per byte that it frees on the device and per step, with B passes that run backward over it and
C captures after it: a stage input 2 copies, an adjoint about 2 B (in and out at each of them), keys and values about
1 + C + 2 B (out once, in for each forward and each backward). So per byte freed stage inputs are the first to
leave the device, then adjoints, then keys and values; but adjoints are the larger kind, and where keys and values alone
free enough they go instead. What decides is the bytes that the order really moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from megatron_branch.plan.plan import Unit
from megatron_branch.schedule.actions import Action
from megatron_branch.state.config import StateConfig
from megatron_branch.state.placement import PLACES, Place, Placement
from megatron_branch.state.predict import Seat, StateSizes, predict_moves, predict_state

# Relative time per byte moved: some 25 GB/s over PCIe 4 to host memory, some 3 GB/s to one NVMe disk. Only the order of
# the candidates depends on it.
TIME_PER_BYTE: dict[Place, float] = {"device": 0.0, "host": 1.0, "nvme": 8.0}


def by_copies(moved: Mapping[str, int], *, files: bool) -> list[Placement]:
    """All placements, the one with the least time in copies first.

    Args:
        moved: see `predict_moves`.
        files: state may go to a disk.
    """
    places = [place for place in PLACES if place != "nvme" or files]

    def cost(placement: Placement) -> float:
        return sum(moved[kind] * TIME_PER_BYTE[place] for kind, place in placement.places.items())

    # Python's sort is stable: what has no bytes to move stays on the device.
    return sorted((Placement(*kinds) for kinds in product(places, repeat=3)), key=cost)


def choose_placement(
    config: StateConfig,
    order: Sequence[Action],
    units: Sequence[Unit],
    sizes: StateSizes,
    *,
    seat: Seat,
    host_room_bytes: int | None = None,
) -> Placement:
    """The placement of a rank for a training order.

    Args:
        config: what is asked for.
        order, units, sizes, seat: see `predict_state`.
        host_room_bytes: what this rank may take of the host's memory, for auto with `state.nvme_path`; None: all it
            needs.

    Raises:
        ValueError: auto, and nothing fits; the message has the numbers.
    """
    if config.placement != "auto":
        return Placement.everything(config.placement)
    assert config.device_budget_bytes is not None, "see StateConfig"
    moved = predict_moves(order, units, sizes, seat=seat)
    least: dict[Place, int] = {}
    for placement in by_copies(moved, files=config.nvme_path is not None):
        peak = predict_state(order, units, sizes, seat=seat, placement=placement).peak_at
        fits_host = host_room_bytes is None or peak["host"] <= host_room_bytes
        if peak["device"] <= config.device_budget_bytes and fits_host:
            return placement
        for place in PLACES:
            least[place] = min(least.get(place, peak[place]), peak[place])
    room = "" if host_room_bytes is None else f", and {host_room_bytes} bytes are free in host memory"
    raise ValueError(
        f"state.device_budget_bytes={config.device_budget_bytes}: no placement fits; with everything elsewhere the "
        f"state still takes {least['device']} bytes on the device{room}; raise the budget or parallel.cp, or lower "
        "branch.activation_budget_bytes where chunks keep their graphs"
    )
