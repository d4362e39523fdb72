"""Executes one stage's order. The only part of the schedule that touches tensors.

Three actions (design: a node owns its targets, so no pass reads another's output):

- capture: forward without autograd; the pass writes its page, and keeps its stage input if it will be replayed. That of
  a retained unit runs with autograd, loss included, and keeps its graph instead;
- tail: forward with autograd, loss, backward; the backward adds into the pages that it read;
- replay: forward again from the stage input (not of a retained unit), backward seeded by the page's own adjoint at each
  layer's keys and values, by the loss on the unit's own targets, and by the hidden gradient of the next stage.

Always true:
- all ranks of a unit (cp, tp) run the same collectives: every layer is seeded on every rank, with zeros where a rank
  owns nothing;
- weights are not changed between the capture and the replay of a unit;
- a graph is held from its forward to its one backward, and by nothing but the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_branch.attention.descriptor import HeadRows, PassDescriptor
from megatron_branch.attention.kernel import Kernel
from megatron_branch.plan.activations import ActivationSizes
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.shard import Shard
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.link import Link
from megatron_branch.schedule.orders import releases
from megatron_branch.state.page import Page
from megatron_branch.state.store import StateStore


@dataclass(eq=False)
class UnitTensors:
    """This rank's share of a unit.

    Attributes:
        input_ids: int64 `[1, t]`, padding included.
        positions: int64 `[t]`.
        shard: which tokens these are.
        attended: which tokens this rank attends to; others than `shard` when Ulysses exchanges them for heads.
        rows: tokens of the hidden states between layers and stages; those of `shard`, or with sequence parallelism a
            tensor-parallel rank's share of them.
        head: rows of this rank whose targets carry loss, possibly none; None where the head need not run at all.
        table: what the loss function needs beside the log-probs; the runner hands it through.
    """

    input_ids: Tensor
    positions: Tensor
    shard: Shard
    attended: Shard
    rows: int
    head: HeadRows | None
    table: Any


@dataclass(eq=False)
class PassInput:
    """What a forward step is given: one pass over one unit (`unit` is None for an idle pass)."""

    unit: Unit | None
    tensors: UnitTensors
    descriptor: PassDescriptor


class StepSource(Protocol):
    """Where the runner gets a unit's tensors from."""

    units: Sequence[Unit]

    def tensors(self, unit: int) -> UnitTensors:
        """Tensors of a unit."""
        ...

    def idle(self) -> UnitTensors:
        """Tensors of a pass without tokens of its own; it has a head without rows."""
        ...


LossFunction = Callable[[Any], tuple[Tensor, Any]]
ForwardStep = Callable[[PassInput, Tensor | None], tuple[Any, LossFunction]]
Timers = Callable[[str], AbstractContextManager[Any]]


@dataclass(eq=False)
class _InFlight:
    """A tail between its two halves."""

    stage_input: Tensor | None
    output: Tensor


@dataclass(eq=False)
class _Graph:
    """The forward of a prefix unit, ready for its one backward.

    Attributes:
        stage_input: a leaf; None on the first stage.
        roots: each layer's keys and values.
        output: what went to the next stage; None on the last.
        loss: on the unit's own targets, on the last stage, if it has any.
    """

    stage_input: Tensor | None
    roots: dict[int, tuple[Tensor, Tensor]]
    output: Tensor | None
    loss: Tensor | None


@dataclass(eq=False)
class Runner:
    """One stage of the pipeline.

    Attributes:
        forward_step: runs the model on a pass from a stage input (None on the first stage); returns the output and the
            loss function, which is called on the last stage with that output.
        store: holds the pages.
        link: the neighbours.
        kernel: attention kernel.
        cp_group, ulysses_group: of context parallelism, see `PassDescriptor`.
        loss_scale: what every loss is multiplied with before the backward, to undo what the host divides by later.
        activations: bytes of retained graphs, for the store's count.
        recompute_layers: tails and replays that run forward keep one hidden state per layer.
        timers: called with the action's kind around each action but idle.
        progress: called after each action.
    """

    forward_step: ForwardStep
    store: StateStore
    link: Link
    kernel: Kernel
    cp_group: Any
    ulysses_group: Any
    timers: Timers
    activations: ActivationSizes
    recompute_layers: bool = False
    loss_scale: float = 1.0
    progress: Callable[[Action], None] | None = None
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _retained: dict[int, _Graph] = field(default_factory=dict)

    def run(self, order: Sequence[Action], source: StepSource, *, forward_only: bool = False) -> list[Any]:
        """Run an order to its end.

        Args:
            order: this stage's actions.
            source: the units and their tensors.
            forward_only: score: no backward, captures report too.

        Returns:
            What the loss function reported for each pass whose head ran, on the last stage.
        """
        reports: list[Any] = []
        freed = releases(order, source.units)
        try:
            with self.store.step():
                for action, done in zip(order, freed, strict=True):
                    with nullcontext() if action.kind == "idle" else self.timers(action.kind):
                        self._act(action, source, forward_only, reports)
                    self.store.settle()
                    for unit in done:
                        self.store.release(unit)
                    if self.progress is not None:
                        self.progress(action)
                self.link.close()
        finally:
            self._in_flight.clear()
            self._retained.clear()
            self.link.abandon()
        return reports

    def _act(self, action: Action, source: StepSource, forward_only: bool, reports: list[Any]) -> None:
        if action.kind == "idle":
            self._idle(source.idle(), forward_only, backward=action.phase == "both" and not forward_only)
            return
        unit = source.units[action.unit]
        if action.kind == "tail" and action.phase == "backward":
            self._tail_backward(unit)
        elif action.kind == "capture":
            self._capture(unit, source.tensors(unit.index), forward_only, reports)
        elif action.kind == "tail":
            self._tail(unit, source.tensors(unit.index), forward_only, reports)
        else:
            self._replay(unit, source.tensors(unit.index), reports)

    def _describe(
        self, unit: Unit | None, tensors: UnitTensors, *, head: bool, backward_follows: bool
    ) -> PassDescriptor:
        """The pass; on the last stage one whose head does not run ends at the last layer's keys and values.

        `backward_follows`: it goes backward at once, or as soon as the next stage has.
        """
        last = self.link.next is None
        rows = tensors.head if head and last else None
        return PassDescriptor(
            positions=tensors.positions,
            shard=tensors.attended,
            context=tuple(self.store.page(index) for index in unit.context) if unit is not None else (),
            kernel=self.kernel,
            cp_group=self.cp_group,
            ulysses_group=self.ulysses_group,
            head=rows,
            state_only=last and rows is None,
            recompute_layers=self.recompute_layers and backward_follows,
        )

    def _capture(self, unit: Unit, tensors: UnitTensors, forward_only: bool, reports: list[Any]) -> None:
        page = self.store.open(unit.index, differentiable=unit.replayed and not forward_only)
        retained = unit.retained and not forward_only
        descriptor = self._describe(unit, tensors, head=forward_only or retained, backward_follows=False)
        descriptor.capture = page
        stage_input = self.link.receive_forward(tensors.rows)
        if retained:
            graph, output = self._forward(unit, tensors, descriptor, stage_input, reports)
            self._retained[unit.index] = graph
            page.count_graph(self.activations.of(unit, tensors.shard.local))
        else:
            if page.differentiable and stage_input is not None:
                page.keep_input(stage_input)
            with torch.no_grad():
                output, loss_function = self.forward_step(PassInput(unit, tensors, descriptor), stage_input)
                self._report(descriptor, output, loss_function, reports)
        if self.link.next is not None:
            self.link.send_forward(unit.index, output, one_way=forward_only)

    def _tail(self, unit: Unit, tensors: UnitTensors, forward_only: bool, reports: list[Any]) -> None:
        descriptor = self._describe(unit, tensors, head=True, backward_follows=not forward_only)
        stage_input = self._differentiable(self.link.receive_forward(tensors.rows), not forward_only)
        with torch.set_grad_enabled(not forward_only):
            output, loss_function = self.forward_step(PassInput(unit, tensors, descriptor), stage_input)
            loss = self._report(descriptor, output, loss_function, reports)
        if self.link.next is not None:
            self.link.send_forward(unit.index, output, one_way=forward_only)
            if not forward_only:
                self._in_flight[unit.index] = _InFlight(stage_input, output)
        elif not forward_only:
            assert loss is not None, "a tail carries loss"
            (loss * self.loss_scale).backward()
            self._send_gradient(unit, stage_input)

    def _tail_backward(self, unit: Unit) -> None:
        flight = self._in_flight.pop(unit.index)
        torch.autograd.backward(flight.output, self.link.receive_backward(unit.index, flight.output.shape[0]))
        self._send_gradient(unit, flight.stage_input)

    def _replay(self, unit: Unit, tensors: UnitTensors, reports: list[Any]) -> None:
        page = self.store.page(unit.index)
        if unit.retained:
            self._backward(unit, tensors, page, self._retained.pop(unit.index))
            return
        descriptor = self._describe(unit, tensors, head=True, backward_follows=True)
        with page.stage_input() as kept:
            graph, _ = self._forward(unit, tensors, descriptor, kept, reports)
            self._backward(unit, tensors, page, graph)

    def _backward(self, unit: Unit, tensors: UnitTensors, page: Page, graph: _Graph) -> None:
        """The backward of a prefix unit, seeded by its page's adjoints, the next stage or its own loss."""
        ends, seeds = _state_seeds(page, graph.roots, tensors.attended)
        if graph.output is not None:
            ends.append(graph.output)
            seeds.append(self.link.receive_backward(unit.index, tensors.rows))
        elif graph.loss is not None:
            ends.append(graph.loss * self.loss_scale)
            seeds.append(None)
        torch.autograd.backward(ends, seeds)
        self._send_gradient(unit, graph.stage_input)

    def _forward(
        self,
        unit: Unit,
        tensors: UnitTensors,
        descriptor: PassDescriptor,
        stage_input: Tensor | None,
        reports: list[Any],
    ) -> tuple[_Graph, Any]:
        """The differentiable forward of a prefix unit: its graph, and the output."""
        roots = descriptor.roots = {}
        leaf = self._differentiable(stage_input, True)
        try:
            output, loss_function = self.forward_step(PassInput(unit, tensors, descriptor), leaf)
            loss = self._report(descriptor, output, loss_function, reports)
        finally:
            descriptor.roots = None  # the graph holds the descriptor, and through the roots would hold itself for ever
        return _Graph(leaf, roots, output if self.link.next is not None else None, loss), output

    def _idle(self, tensors: UnitTensors, forward_only: bool, *, backward: bool) -> None:
        """The collectives of a capture, or of a tail or replay, with a loss over no entries."""
        descriptor = self._describe(None, tensors, head=backward or forward_only, backward_follows=backward)
        with torch.set_grad_enabled(backward):
            output, loss_function = self.forward_step(PassInput(None, tensors, descriptor), None)
            if backward:
                (loss_function(output)[0] * self.loss_scale).backward()

    @staticmethod
    def _report(
        descriptor: PassDescriptor, output: Any, loss_function: LossFunction, reports: list[Any]
    ) -> Tensor | None:
        """The loss of a pass whose head ran, else None."""
        if descriptor.head is None:
            return None
        loss, report = loss_function(output)
        reports.append(report)
        return loss

    @staticmethod
    def _differentiable(stage_input: Tensor | None, wanted: bool) -> Tensor | None:
        return stage_input.detach().requires_grad_() if stage_input is not None and wanted else stage_input

    def _send_gradient(self, unit: Unit, stage_input: Tensor | None) -> None:
        if stage_input is not None:
            assert stage_input.grad is not None
            self.link.send_backward(unit.index, stage_input.grad)


def _state_seeds(
    page: Page, roots: dict[int, tuple[Tensor, Tensor]], shard: Shard
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Each layer's keys and values as graph tensors, and the page's adjoints padded to them."""
    ends: list[Tensor] = []
    seeds: list[Tensor | None] = []
    for layer, pair in roots.items():
        ends += pair
        seeds += _layer_seeds(page, layer, pair, shard)
    return ends, seeds


def _layer_seeds(page: Page, layer: int, pair: tuple[Tensor, Tensor], shard: Shard) -> list[Tensor]:
    seeds = [torch.zeros_like(root_tGD, memory_format=torch.contiguous_format) for root_tGD in pair]
    with page.own_adjoint(layer) as adjoints:
        for seed, adjoint_PGD in zip(seeds, adjoints or (), strict=adjoints is not None):
            taken = 0
            for start, end in shard.valid:
                seed[start:end] = adjoint_PGD[taken : taken + end - start]
                taken += end - start
    return seeds
