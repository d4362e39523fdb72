"""Bytes and seconds of one step under a configuration, by the program's own formulas and stated rates. A plan, no
measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture, stage_layers
from megatron_branch.engine.sizes import DTYPE_BYTES, stage_sizes
from megatron_branch.engine.tensor_layout import stage_elements
from megatron_branch.plan.hardware import Assumptions, Hardware
from megatron_branch.plan.model_bytes import HostShape, ModelBytes, model_bytes
from megatron_branch.plan.pass_bytes import PassTokens, attention_buffer_bytes, head_bytes
from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.plan.shard import shard_unit
from megatron_branch.plan.tables import loss_rows
from megatron_branch.plan.traffic import Split
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import longest_path_tokens, training_orders
from megatron_branch.schedule.seconds import Copied, Seconds, StageWork, seconds_durations
from megatron_branch.schedule.simulate import Simulation, simulate
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.placement import Placement
from megatron_branch.state.predict import Seat, predict_moves, predict_state
from megatron_branch.tree.node import Tree

ADAM_MOMENTS = 2
# A fused Adam reads gradient, master and both moments, and writes the latter three and the weight.
UPDATE_BYTES_PER_ELEMENT = 32


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the fullest rank of one pipeline stage while passes run, and at the update.

    Attributes:
        device: by kind.
        host, disk: of the state that lives there.
        update: on the device during the update.
    """

    device: dict[str, int]
    host: int
    disk: int
    update: int

    @property
    def peak(self) -> int:
        """On the device."""
        return max(sum(self.device.values()), self.update)


@dataclass(frozen=True)
class StepSeconds:
    """Time of one step.

    Attributes:
        phases: of the busiest pipeline stage, by kind of action.
        busiest: that stage.
        update: reduction of the gradients and optimizer.
        simulation: of the whole pipeline.
    """

    phases: dict[str, Seconds]
    busiest: int
    update: float
    simulation: Simulation

    @property
    def waiting(self) -> float:
        """Of the busiest stage, for other stages."""
        return self.simulation.makespan - self.simulation.busy[self.busiest]

    @property
    def total(self) -> float:
        """Wall time of the step."""
        return self.simulation.makespan + self.update


def held_by_model(config: Config, elements: Sequence[int], *, ranks: int, zero: int) -> ModelBytes:
    """Bytes of a shard with these parameters, which `ranks` ranks hold, under the configuration's optimizer."""
    optimizer = config.optimizer
    moments = (1 if optimizer.momentum else 0) if optimizer.name == "sgd" else ADAM_MOMENTS
    each_pass = config.zero.reduce == "pass" and zero >= 2
    return model_bytes(elements, HostShape(zero, ranks, DTYPE_BYTES[config.model.dtype], moments, each_pass=each_pass))


@dataclass(frozen=True)
class BusiestRank:
    """The data-parallel rank of a plan with the most work.

    Attributes:
        units: its units.
        rows: per unit, positions at which the head runs.
        orders: per pipeline stage.
        ranks: number of data-parallel ranks.
    """

    units: tuple[Unit, ...]
    rows: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    ranks: int


def busiest_rank(plan: Plan, trees: Sequence[Tree], rollouts: Sequence[Rollout], *, pp: int) -> BusiestRank:
    """Of a plan over `pp` stages."""
    rank = max(range(len(plan.ranks)), key=lambda rank: sum(unit.tokens for unit in plan.ranks[rank].units))
    units = plan.ranks[rank].units
    rows = tuple(len(loss_rows(unit, trees, rollouts).rows) for unit in units)
    return BusiestRank(units, rows, training_orders(plan, rank, pp), len(plan.ranks))


class Estimate:
    """A planned step on one data-parallel rank, the one with the most work.

    What a configuration's ZeRO stage changes is asked for by stage, so that one estimate serves them all.

    Args:
        config: layout, chunks, dtype.
        arch: the model.
        step: the planned step.
        placement: where the state lives.
        counts: per stage, bytes of the state where they are known; filled in.
    """

    def __init__(
        self,
        config: Config,
        arch: Architecture,
        step: BusiestRank,
        *,
        placement: Placement,
        counts: dict[int, ByteCount] | None = None,
    ) -> None:
        self.config, self.arch, self.placement, self.sizes = config, arch, placement, config.parallel
        self.units, self.rows, self.orders = step.units, step.rows, step.orders
        self.layers = stage_layers(arch, self.sizes.pp)
        self.per_token = stage_sizes(config, arch, device="cuda")
        dtype_bytes = DTYPE_BYTES[config.model.dtype]
        self.split = Split(self.sizes.tp, self.sizes.cp, dtype_bytes, self.sizes.ulysses)
        self.replicas = self.sizes.cp * step.ranks
        self._elements = stage_elements(arch, tp=self.sizes.tp, pp=self.sizes.pp)
        # The last of the context-parallel ranks has no padding.
        self._seat = Seat(self.sizes.cp, self.sizes.cp - 1, ulysses=self.sizes.ulysses)
        self._counts = counts if counts is not None else {}
        self._passes: dict[int, RankBytes] = {}
        self._phases: dict[bool, StepSeconds] = {}

    def rank_bytes(self, stage: int, *, zero: int) -> RankBytes:
        """Of the fullest rank of a pipeline stage at a ZeRO stage: all of its ranks hold as much, up to padding."""
        if stage not in self._passes:
            self._passes[stage] = self._pass_bytes(stage)
        model, passes = self._model(stage, zero), self._passes[stage]
        held = {
            "weights": model.weights,
            "gradients": model.gradients,
            "optimizer": model.optimizer,
            "buffers of ZeRO": model.buffers,
        }
        return replace(passes, device=held | passes.device, update=model.in_update)

    def state_bytes(self, stage: int) -> int:
        """Of `rank_bytes`, what the state takes on the device."""
        kinds = {*self.placement.places, "state on its way"}
        return sum(size for kind, size in self._passes[stage].device.items() if kind in kinds)

    def moved(self) -> dict[str, int]:
        """Bytes that the first stage would copy, by kind kept elsewhere."""
        return predict_moves(self.orders[0], self.units, self.per_token[0], seat=self._seat)

    def seconds(self, hardware: Hardware, assumed: Assumptions, *, zero: int) -> StepSeconds:
        """By the rates of a machine, at a ZeRO stage."""
        if (zero == 3) not in self._phases:
            self._phases[zero == 3] = self._phase_seconds(hardware, assumed, gathers=zero == 3)
        known = self._phases[zero == 3]
        return replace(known, update=self._update_seconds(known.busiest, hardware, assumed, zero))

    def _model(self, stage: int, zero: int) -> ModelBytes:
        return held_by_model(self.config, self._elements[stage], ranks=self.replicas, zero=zero)

    def _pass_bytes(self, stage: int) -> RankBytes:
        """Of state and passes."""
        if stage not in self._counts:
            self._counts[stage] = predict_state(
                self.orders[stage], self.units, self.per_token[stage], seat=self._seat, placement=self.placement
            )
        count = self._counts[stage]
        device = {kind: count.peak[kind] for kind, place in self.placement.places.items() if place == "device"}
        # What the kinds leave of the peak of their sum: layers of what is kept elsewhere, gathered stage inputs.
        device["state on its way"] = max(count.peak_at["device"] - sum(device.values()) - count.peak["activations"], 0)
        device["retained activations"] = count.peak["activations"]
        return RankBytes(device | self._pass(stage), count.peak_at["host"], count.peak_at["nvme"], 0)

    def _local(self, unit: Unit) -> int:
        segments = tuple(segment.tokens for segment in unit.segments)
        return shard_unit(segments, cp=self.sizes.cp, rank=0, align=self.sizes.sequence_ranks).local

    def _graph(self, unit: Unit, stage: int, local: int) -> int:
        """Bytes of the graph of a pass that goes backward, with `local` tokens on this rank."""
        sizes, layers = self.per_token[stage], self.layers[stage]
        whole = sizes.activations.of(unit, local) + local * sizes.kv * self.sizes.ulysses
        if not self.config.branch.recompute_layers:
            return whole
        rows = local // self.sizes.sequence_ranks
        return layers * rows * self.arch.hidden * self.split.dtype_bytes + whole // layers

    def _pass(self, stage: int) -> dict[str, int]:
        """What passes take, each kind at its largest."""
        last, shape = stage == self.sizes.pp - 1, self.arch.shape()
        local = {unit.index: self._local(unit) for unit in self.units}
        tokens = PassTokens(
            local=max(local.values(), default=0),
            rows=max((-(-rows // self.sizes.cp) for rows in self.rows), default=0) if last else 0,
            page=max((local[unit.index] for unit in self.units if unit.kind == "prefix"), default=0),
        )
        graphs = {unit.index: self._graph(unit, stage, local[unit.index]) for unit in self.units}
        tails = [graphs[unit.index] for unit in self.units if unit.kind == "tail"]
        again = [graphs[unit.index] for unit in self.units if unit.replayed and not unit.retained]
        # A pipeline stage has as many tails in flight as there are stages from it to the last.
        in_flight = max(tails, default=0) * min(self.sizes.pp - stage, len(tails))
        largest = max(graphs.values(), default=0)
        kinds = {
            # A backward holds the gradients of one layer's tensors at most.
            "activations of a pass": max([*again, in_flight]) + largest // self.layers[stage],
            "attention buffers": attention_buffer_bytes(tokens, shape, self.split),
        }
        if last:
            chunk = self.config.objective.head_chunk_tokens
            kinds["head"] = head_bytes(tokens, shape, self.split, chunk_tokens=chunk)
        else:
            path = -(-longest_path_tokens(self.units) // self.sizes.cp)
            kinds["messages"] = path * self.arch.hidden * self.split.dtype_bytes
        return kinds

    def _phase_seconds(self, hardware: Hardware, assumed: Assumptions, *, gathers: bool) -> StepSeconds:
        work = self._work(hardware, assumed, gathers=gathers)
        parts = seconds_durations(self.units, work, rows=self.rows, hardware=hardware, assumed=assumed)
        by_stage = [[parts(action, stage) for action in order] for stage, order in enumerate(self.orders)]
        known = {
            (action, stage): part.total
            for stage, order in enumerate(self.orders)
            for action, part in zip(order, by_stage[stage], strict=True)
        }
        simulation = simulate(self.orders, self.units, duration=lambda action, stage: known[action, stage])
        busiest = max(range(self.sizes.pp), key=lambda stage: simulation.busy[stage])
        phases = {"capture": Seconds(), "tail": Seconds(), "replay": Seconds()}
        for action, part in zip(self.orders[busiest], by_stage[busiest], strict=True):
            phases[action.kind] += part
        return StepSeconds(phases, busiest, 0.0, simulation)

    def _work(self, hardware: Hardware, assumed: Assumptions, *, gathers: bool) -> list[StageWork]:
        rates = {"device": 0.0, "host": 1 / hardware.host_rate, "nvme": 1 / hardware.disk_rate}
        waits = {kind: rates[place] / assumed.host for kind, place in self.placement.places.items()}
        stages = []
        for stage, layers in enumerate(self.layers):
            sizes = self.per_token[stage]
            gathered = sum(self._elements[stage]) * self.split.dtype_bytes if gathers else 0
            copied = Copied(
                kv=sizes.kv * self.sizes.ulysses * waits["state"],
                adjoint=sizes.adjoint * self.sizes.ulysses * waits["adjoint"],
                stage_input=sizes.stage_input / self.sizes.tp * waits["stage_input"],
            )
            stages.append(
                StageWork(
                    shape=self.arch.shape(),
                    split=self.split,
                    layers=layers,
                    last=stage == self.sizes.pp - 1,
                    stages=self.sizes.pp,
                    weight_bytes=gathered * (self.replicas - 1) / self.replicas,
                    copied=copied,
                    recompute_layers=self.config.branch.recompute_layers,
                )
            )
        return stages

    def _update_seconds(self, stage: int, hardware: Hardware, assumed: Assumptions, zero: int) -> float:
        """Gradients are summed in float32 over the ranks with the same shard, once or in every pass that goes backward;
        then the optimizer reads its memory.
        """
        elements, others = sum(self._elements[stage]), (self.replicas - 1) / self.replicas
        owned = elements if zero == 0 else elements / self.replicas
        weights = 0 if zero in (0, 3) else elements * self.split.dtype_bytes
        backwards = sum(action.kind != "idle" and action.phase != "forward" for action in self.orders[stage])
        times = backwards if self.config.zero.reduce == "pass" else 1
        reduced = elements * self.split.precise * (2 if zero == 0 else 1) * times
        moved = (reduced + weights) * others / (hardware.link_rate * assumed.link)
        return moved + owned * UPDATE_BYTES_PER_ELEMENT / hardware.memory_rate
