"""How long an action takes by stated rates: products, the layers' other work, collectives, copies of state.

Compute and collectives follow each other; copies of state run beside them, so an action takes the longer of the two.

Always true:
- the parts of an action are its whole time, once what copies hide behind the rest is taken off;
- padding and the layer that a loss-free prefix leaves out are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from megatron_branch.plan.cost import ModelShape, PassFlops, UnitPhase, pass_flops
from megatron_branch.plan.hardware import Assumptions, Hardware
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.traffic import Split, context_parallel_bytes, tensor_parallel_bytes
from megatron_branch.schedule.actions import Action

Passes = tuple[float, float]
"""How many forwards and backwards an action runs."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Parts of the time of some actions on one rank.

    Attributes:
        linear, attention, head: products.
        layers: what layers do beside products: launches, norms.
        tensor_parallel, context_parallel: collectives inside layers.
        stages: messages between pipeline stages.
        weights: gathering partitioned weights (ZeRO 3).
        copies: of state, as far as nothing hides them.
        hidden_copies: of state, behind the rest; not part of `total`.
    """

    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    layers: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    stages: float = 0.0
    weights: float = 0.0
    copies: float = 0.0
    hidden_copies: float = 0.0

    @property
    def total(self) -> float:
        """Wall time."""
        return sum(value for name, value in self.parts().items() if name != "hidden_copies")

    def parts(self) -> dict[str, float]:
        """By name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def __add__(self, other: Seconds) -> Seconds:
        theirs = other.parts()
        return Seconds(**{name: value + theirs[name] for name, value in self.parts().items()})


@dataclass(frozen=True, slots=True)
class Copied:
    """State that lives away from the device, in seconds of copying per local token of a unit; 0 for what does not.

    Attributes:
        kv: keys and values of the stage's layers, one way.
        adjoint: their adjoints, one way.
        stage_input: hidden states that entered the stage, one way.
    """

    kv: float = 0.0
    adjoint: float = 0.0
    stage_input: float = 0.0


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one rank of a pipeline stage does.

    Attributes:
        shape: of the whole model.
        split: over tensor and context-parallel ranks.
        layers: of the stage.
        last: it has the head.
        stages: number of pipeline stages.
        weight_bytes: gathered in every forward, and in every backward, of a pass.
        copied: state that lives elsewhere.
        recompute_layers: passes that go backward run their layers forward once more.
    """

    shape: ModelShape
    split: Split
    layers: int
    last: bool = True
    stages: int = 1
    weight_bytes: float = 0.0
    copied: Copied = Copied()
    recompute_layers: bool = False

    def local(self, unit: Unit) -> float:
        """A rank's tokens of a unit."""
        return unit.tokens / self.split.cp


def action_seconds(
    action: Action, unit: Unit, work: StageWork, *, rows: int, hardware: Hardware, assumed: Assumptions
) -> Seconds:
    """The parts of one action's time on one rank.

    Args:
        action: no idle.
        unit: what it runs.
        work: the rank's share of the model.
        rows: positions at which the head runs, over all context-parallel ranks.
        hardware, assumed: rates.
    """
    forwards, backwards = _passes(action, unit, work)
    flops = _flops(action, unit, work, rows if work.last else 0)
    share = work.layers / work.shape.layers / (work.split.tp * work.split.cp)
    link = hardware.link_rate * assumed.link
    local = work.local(unit)
    ahead, back = context_parallel_bytes(round(local), work.shape, work.split)
    messages = local * work.shape.hidden * work.split.dtype_bytes if work.stages > 1 else 0.0
    parts = Seconds(
        linear=flops.linear * share / (hardware.flops * assumed.gemm),
        attention=flops.attention * share / (hardware.flops * assumed.attention),
        head=flops.head / (work.split.tp * work.split.cp) / (hardware.flops * assumed.gemm),
        layers=work.layers * assumed.pass_s * (forwards + 2 * backwards),
        tensor_parallel=work.layers
        * (forwards + backwards)
        * tensor_parallel_bytes(round(local), work.shape, work.split)
        / link,
        context_parallel=work.layers * (forwards * ahead + backwards * back) / link,
        stages=messages / link,
        weights=work.weight_bytes * (forwards + backwards) / link,
    )
    copies = _copies(action, unit, work)
    busy = parts.total
    return parts + Seconds(copies=max(copies - busy, 0.0), hidden_copies=min(copies, busy))


def _passes(action: Action, unit: Unit, work: StageWork) -> Passes:
    forwards, backwards = {"forward": (1.0, 0.0), "backward": (0.0, 1.0), "both": (1.0, 1.0)}[action.phase]
    again = backwards if work.recompute_layers and not unit.retained else 0.0
    return forwards + again, backwards


def _flops(action: Action, unit: Unit, work: StageWork, rows: int) -> PassFlops:
    """Of the whole model."""
    if action.kind == "capture":
        return pass_flops(unit, work.shape, phase="capture", rows=rows)
    if action.kind == "tail" and action.phase == "forward":
        return pass_flops(unit, work.shape, phase="score", rows=rows)
    phase: UnitPhase = "tail" if action.kind == "tail" else "replay"
    both = pass_flops(unit, work.shape, phase=phase, rows=rows, recompute_layers=work.recompute_layers)
    if action.kind == "replay" or action.phase == "both":
        return both
    forward = pass_flops(unit, work.shape, phase="score", rows=rows)
    return PassFlops(*(whole - part for whole, part in zip(both, forward, strict=True)))


def _copies(action: Action, unit: Unit, work: StageWork) -> float:
    """Context keys and values in every forward and backward, their adjoints in and out of every backward; a prefix's
    own state out of its capture, its adjoint and its stage input into its replay.
    """
    forwards, backwards = _passes(action, unit, work)
    copied, local = work.copied, work.local(unit)
    context = unit.context_tokens / work.split.cp
    seconds = context * (copied.kv * (forwards + backwards) + 2 * copied.adjoint * backwards)
    if action.kind == "capture":
        seconds += local * (copied.kv + copied.stage_input)
    elif action.kind == "replay":
        seconds += local * (copied.adjoint + copied.stage_input)
    return seconds


def seconds_durations(
    units: Sequence[Unit],
    stages: Sequence[StageWork],
    *,
    rows: Sequence[int],
    hardware: Hardware,
    assumed: Assumptions,
) -> Callable[[Action, int], Seconds]:
    """Parts of the time of an action on a stage; an idle takes none.

    Args:
        units: of the data-parallel rank.
        stages: per pipeline stage.
        rows: per unit, positions at which the head runs.
        hardware, assumed: rates.
    """

    def duration(action: Action, stage: int) -> Seconds:
        if action.unit < 0:
            return Seconds()
        unit = units[action.unit]
        return action_seconds(action, unit, stages[stage], rows=rows[action.unit], hardware=hardware, assumed=assumed)

    return duration
