"""How many bytes of state an order will hold: the store's additions and removals, walked without tensors.

Always true: for the same order, units and placement, the prediction equals what `StateStore.count` measures, to the
byte, by kind and by place. (Where data-parallel ranks must make the same passes, the replay of a unit without loss
reads one layer more than counted here; with three layers or more that changes nothing.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_branch.plan.activations import ActivationSizes, Precision, StageShape, activation_sizes
from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.shard import shard_unit
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import releases
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.placement import Place, Placement, own_rows, stored_bytes


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes per token on one rank.

    Attributes:
        kv: keys and values of all layers of the stage, local KV heads, in the model's dtype.
        adjoint: the same in the accumulation dtype.
        stage_input: hidden states entering the stage; 0 on the first stage.
        activations: of retained graphs.
        layers: number of layers of the stage.
        last_stage: passes that only leave state end there at the last layer's keys and values.
        sequence: tensor-parallel ranks that share the tokens between layers; 1: each has all of them.
        replicas: tensor-parallel ranks that have the same stage inputs; each keeps its rows of them.
    """

    kv: int
    adjoint: int
    stage_input: int
    activations: ActivationSizes
    layers: int
    last_stage: bool
    sequence: int
    replicas: int


def kv_heads_here(kv_heads: int, *, tp: int, ulysses: int = 1) -> int:
    """KV heads of one rank's state: an equal share, or one that several ranks of a Ulysses group hold."""
    return max(kv_heads // tp // ulysses, 1)


def state_sizes(shape: ModelShape, stage: StageShape, precision: Precision, *, qk_norm: bool) -> StateSizes:
    """Sizes of a stage; arguments as of `activation_sizes`."""
    elements = 2 * stage.layers * kv_heads_here(shape.kv_heads, tp=stage.tp, ulysses=stage.ulysses) * shape.head_dim
    return StateSizes(
        kv=elements * precision.dtype_bytes,
        adjoint=elements * precision.accumulated,
        stage_input=0 if stage.first else shape.hidden * precision.dtype_bytes,
        activations=activation_sizes(shape, stage, precision, qk_norm=qk_norm),
        layers=stage.layers,
        last_stage=stage.last,
        sequence=stage.sequence,
        replicas=stage.tp // stage.sequence,
    )


@dataclass(frozen=True, slots=True)
class Seat:
    """Which of the ranks that hold one tree.

    Attributes:
        cp: number of context-parallel ranks; `cp_rank` is this one.
        tp_rank: this rank of tensor parallelism.
        ulysses: size of the Ulysses groups among the context-parallel ranks.
    """

    cp: int = 1
    cp_rank: int = 0
    tp_rank: int = 0
    ulysses: int = 1


def predict_state(
    order: Sequence[Action],
    units: Sequence[Unit],
    sizes: StateSizes,
    *,
    seat: Seat,
    placement: Placement | None = None,
) -> ByteCount:
    """Peak bytes, by kind and by place, of a training order on one rank; all on the device by default."""
    walk = _Walk(units, sizes, seat, placement or Placement())
    walk.run(order)
    return walk.count


def predict_moves(order: Sequence[Action], units: Sequence[Unit], sizes: StateSizes, *, seat: Seat) -> dict[str, int]:
    """Bytes that a training order would copy to or from another place than the device, by kind kept there."""
    walk = _Walk(units, sizes, seat, Placement.everything("host"))
    walk.run(order)
    return walk.moved


@dataclass(slots=True)
class _Page:
    """Bytes of one unit: moving sizes of one layer, and what is stored by kind."""

    kv: int
    adjoint: int
    part: int
    whole: int
    graph: int
    replayed: bool
    stored: dict[str, int] = field(default_factory=dict)


class _Walk:
    """Repeats what pages, `read_layer` and the runner do, in their order, for layers of equal size.

    Where nothing of a layer moves, all layers are walked as one.
    """

    def __init__(self, units: Sequence[Unit], sizes: StateSizes, seat: Seat, placement: Placement) -> None:
        self.units, self.sizes, self.seat = units, sizes, seat
        self.count = ByteCount()
        self.moved = {"state": 0, "adjoint": 0, "stage_input": 0}
        self._places: Mapping[str, Place] = {**placement.places, "activations": "device"}
        by_layer = placement.state != "device" or placement.adjoint != "device"
        self._layers = sizes.layers if by_layer else 1
        self._pages: dict[int, _Page] = {}
        self._leaving: list[tuple[int, str, int]] = []

    def run(self, order: Sequence[Action]) -> None:
        for action, done in zip(order, releases(order, self.units), strict=True):
            if action.kind == "capture":
                self._capture(self.units[action.unit])
            elif action.kind == "tail":
                self._tail(self.units[action.unit], action.phase)
            elif action.kind == "replay":
                self._replay(self.units[action.unit])
            self._settle(None)
            for unit in done:
                for kind, size in self._pages.pop(unit).stored.items():
                    self.count.add(kind, -size, self._places[kind])

    def _capture(self, unit: Unit) -> None:
        page = self._pages[unit.index] = self._page(unit)
        path = self._path_kv(unit)
        if unit.replayed and not unit.retained:
            self._keep(page, "stage_input", (page.part,), 0)
        read = self._read_layers(state_only=self.sizes.last_stage and not (unit.retained and unit.trained))
        ahead = dict(_fetches(range(1, read + 1)))
        for layer in range(1, self._layers + 1):
            self._settle(layer)
            self._keep(page, "state", (page.kv // 2, page.kv - page.kv // 2), layer)
            if layer in ahead:
                self._fetch("state", path, ahead[layer])
                self._drop("state", path)
        if unit.retained:
            # The graph shares keys and values with the state, unless that went elsewhere.
            shared = page.kv * self._layers if self._places["state"] != "device" else 0
            page.stored["activations"] = page.graph + shared
            self.count.add("activations", page.graph + shared)

    def _tail(self, unit: Unit, phase: str) -> None:
        if phase != "backward":
            self._forward(unit, self._read_layers(state_only=False))
        if phase != "forward":
            self._backward(unit, self._read_layers(state_only=False))

    def _replay(self, unit: Unit) -> None:
        page = self._pages[unit.index]
        read = self._read_layers(state_only=self.sizes.last_stage and not unit.trained)
        gathered = self.sizes.replicas > 1 and not unit.retained
        if not unit.retained:
            self._fetch("stage_input", page.part, 1)
            if gathered:
                self.count.add("moving", page.whole)
                self._drop("stage_input", page.part)
            self._forward(unit, read)
        if "adjoint" in page.stored:
            for _, fetched in _fetches(range(1, self._layers + 1)):
                self._fetch("adjoint", page.adjoint, fetched)
                self._drop("adjoint", page.adjoint)
        self._backward(unit, read)
        if gathered:
            self.count.add("moving", -page.whole)
        elif not unit.retained:
            self._drop("stage_input", page.part)

    def _forward(self, unit: Unit, read: int) -> None:
        path = self._path_kv(unit)
        for _, fetched in _fetches(range(1, read + 1)):
            self._fetch("state", path, fetched)
            self._drop("state", path)

    def _backward(self, unit: Unit, read: int) -> None:
        path = self._path_kv(unit)
        pages = [page for page in (self._pages[prefix] for prefix in unit.context) if page.replayed]
        new = [page for page in pages if "adjoint" not in page.stored]
        known = sum(page.adjoint for page in pages if "adjoint" in page.stored)
        for layer, fetched in _fetches(range(read, 0, -1)):
            self._settle(layer)
            self._fetch("state", path, fetched)
            self._fetch("adjoint", known, fetched)
            self._leave("adjoint", known, layer)
            for page in new:
                self._keep(page, "adjoint", (page.adjoint // 2, page.adjoint - page.adjoint // 2), layer)
            self._drop("state", path)

    def _path_kv(self, unit: Unit) -> int:
        return sum(self._pages[prefix].kv for prefix in unit.context)

    def _keep(self, page: _Page, kind: str, sizes: tuple[int, ...], layer: int) -> None:
        size = stored_bytes(sizes, self._places[kind])
        page.stored[kind] = page.stored.get(kind, 0) + size
        self.count.add(kind, size, self._places[kind])
        self._moving(kind, sum(sizes))
        self._leave(kind, sum(sizes), layer)

    def _fetch(self, kind: str, size: int, times: int) -> None:
        self._moving(kind, size * times)
        self.moved[kind] += size * times

    def _leave(self, kind: str, size: int, layer: int) -> None:
        self._leaving.append((layer, kind, size))
        self.moved[kind] += size

    def _drop(self, kind: str, size: int) -> None:
        self._moving(kind, -size)

    def _settle(self, but: int | None) -> None:
        for layer, kind, size in self._leaving:
            if layer != but:
                self._moving(kind, -size)
        self._leaving = [left for left in self._leaving if left[0] == but]

    def _moving(self, kind: str, size: int) -> None:
        place = self._places[kind]
        if place != "device":
            self.count.add("moving", size)
        if place == "nvme":
            self.count.add("moving", size, "host")

    def _read_layers(self, *, state_only: bool) -> int:
        """How many layers' state a pass reads."""
        return min(self._layers, self.sizes.layers - state_only)

    def _page(self, unit: Unit) -> _Page:
        sizes, seat = self.sizes, self.seat
        segments = tuple(segment.tokens for segment in unit.segments)
        outside, attended = (
            shard_unit(segments, cp=seat.cp, rank=seat.cp_rank, ulysses=ulysses, align=sizes.sequence)
            for ulysses in (1, seat.ulysses)
        )
        rows = outside.local // sizes.sequence
        start, end = own_rows(rows, sizes.replicas, seat.tp_rank % sizes.replicas)
        return _Page(
            kv=attended.owned * sizes.kv // self._layers,
            adjoint=attended.owned * sizes.adjoint // self._layers,
            part=(end - start) * sizes.stage_input,
            whole=rows * sizes.stage_input,
            graph=sizes.activations.of(unit, outside.local) if unit.retained else 0,
            replayed=unit.replayed,
        )


def _fetches(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The layers of a pass in its order, each with how many layers start to be fetched when it is read."""
    for place, layer in enumerate(layers):
        yield layer, min(len(layers) - place, 2) - (1 if place else 0)
