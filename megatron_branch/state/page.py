"""What one prefix unit leaves behind on one rank.

Shapes: P own tokens of the unit (this rank's share, padding excluded), G local KV heads, D head size.

Always true:
- a page holds exactly the tokens that its rank owns, in local order, for every layer of its stage;
- keys are stored after the rotary embedding, so a page can be attended to in any order;
- adjoints are float32 (float64 for a float64 model) and start as the first contribution, later ones are added in place;
- readers get a layer's tensors on the device, wherever the placement keeps them, and at most two layers of what is kept
  elsewhere are there at a time: the one that is read and the next one in the order of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_branch.state.keep import Keeper, Kept, Key
from megatron_branch.state.partition import Replicas


def adjoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """Adjoints and merges are accumulated in float32, in float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False)
class Page:
    """Keys, values, their adjoints and the stage input of one prefix unit.

    Attributes:
        unit: index of the unit, for messages.
        keeper: keeps its tensors.
        replicas: the ranks that hold the same stage input.
        differentiable: a gradient flows into it; a page of a constant unit has no adjoint.
        activation_bytes: of the unit's retained graph, which the runner holds; 0 where there is none.
    """

    unit: int
    keeper: Keeper
    replicas: Replicas
    differentiable: bool
    activation_bytes: int = 0
    _state: dict[int, Kept] = field(default_factory=dict)
    _adjoint: dict[int, Kept] = field(default_factory=dict)
    _input: Kept | None = None
    _input_rows: int = 0
    _written_bytes: int = 0

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the layers written so far, ascending."""
        return tuple(self._state)

    def write(self, layer: int, k_PGD: Tensor, v_PGD: Tensor) -> None:
        """Store a layer's keys and values; each layer is written once.

        Raises:
            AssertionError: the layer is there already (a recomputed forward must not append again).
        """
        assert layer not in self._state, f"state of unit {self.unit}, layer {layer} written twice"
        self.keeper.settle(but=layer)
        self._state[layer] = self.keeper.keep(Key("state", self.unit, layer), (k_PGD, v_PGD))
        self._written_bytes += k_PGD.nbytes + v_PGD.nbytes

    def add_adjoint(self, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        """Add a reader's gradient in place."""
        assert self.differentiable, f"unit {self.unit} is constant, nothing may flow into it"
        kept = self._adjoint.get(layer)
        if kept is not None:
            for total, part in zip(kept.get(), (dk_PGD, dv_PGD), strict=True):
                total.add_(part)
            kept.put_back()
            return
        first = tuple(
            part.to(adjoint_dtype(part.dtype), copy=True, memory_format=torch.contiguous_format)
            for part in (dk_PGD, dv_PGD)
        )
        self._adjoint[layer] = self.keeper.keep(Key("adjoint", self.unit, layer), first)

    def prefetch(self, layer: int, *, adjoint: bool) -> None:
        """Start to bring a layer's state, and where asked its adjoint, to the device, as far as they exist."""
        for kept in (self._state.get(layer), self._adjoint.get(layer) if adjoint else None):
            if kept is not None:
                kept.prefetch()

    def state(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values `[P, G, D]` on the device."""
        k_PGD, v_PGD = self._state[layer].get()
        return k_PGD, v_PGD

    def drop(self, layer: int) -> None:
        """A layer is read; what was brought to the device for it may go."""
        for kept in (self._state.get(layer), self._adjoint.get(layer)):
            if kept is not None:
                kept.drop()

    @contextmanager
    def own_adjoint(self, layer: int) -> Iterator[tuple[Tensor, ...] | None]:
        """A layer's adjoints `[P, G, D]` on the device, None where nothing flowed in; layers are read ascending."""
        self.keeper.settle()
        for near in (layer, layer + 1):
            if near in self._adjoint:
                self._adjoint[near].prefetch()
        kept = self._adjoint.get(layer)
        yield None if kept is None else kept.get()
        if kept is not None:
            kept.drop()

    def keep_input(self, hidden: Tensor) -> None:
        """Keep the hidden states that entered this stage, `[t, 1, hidden]`, the unit's only activation checkpoint."""
        self._input_rows = hidden.shape[0]
        self._input = self.keeper.keep(Key("stage_input", self.unit, 0), (self.replicas.part(hidden),))

    def count_graph(self, size: int) -> None:
        """Count the bytes of the unit's retained graph as long as this page lives.

        Args:
            size: keys and values aside, which the graph shares with the state; not where that is kept elsewhere.
        """
        self.activation_bytes = size + (self._written_bytes if self.keeper.placement.state != "device" else 0)
        self.keeper.count.add("activations", self.activation_bytes)

    @contextmanager
    def stage_input(self) -> Iterator[Tensor | None]:
        """The hidden states that were kept, whole (collective over the replicas); None on the first stage."""
        if self._input is None:
            yield None
            return
        (part,) = self._input.get()
        if self.replicas.size == 1:
            yield part
            self._input.drop()
            return
        whole = self.replicas.whole(part, self._input_rows)
        self.keeper.count.add("moving", whole.nbytes)
        try:
            self._input.drop()
            del part
            yield whole
        finally:
            self.keeper.count.add("moving", -whole.nbytes)

    def free(self) -> None:
        """Let go of everything."""
        for kept in (*self._state.values(), *self._adjoint.values(), self._input):
            if kept is not None:
                kept.free()
        self.keeper.count.add("activations", -self.activation_bytes)
        self._state, self._adjoint, self._input, self.activation_bytes = {}, {}, None, 0


@contextmanager
def read_layer(
    pages: Sequence[Page], layer: int, *, following: int | None, adjoints: bool, last: bool
) -> Iterator[tuple[tuple[Page, Tensor, Tensor], ...]]:
    """One layer of a path on the device, while the layer that is read next is on its way.

    Args:
        pages: the path.
        layer: what is read.
        following: the layer that is read next; None at the end of a pass.
        adjoints: gradients will be added, so adjoints come too.
        last: the pass reads this layer no more.

    Yields:
        each page with its keys and values `[P, G, D]`.
    """
    if pages:
        pages[0].keeper.settle(but=layer)
    for number in (layer,) if following is None else (layer, following):
        for page in pages:
            page.prefetch(number, adjoint=adjoints)
    yield tuple((page, *page.state(layer)) for page in pages)
    for page in pages if last else ():
        page.drop(layer)
