"""How many bytes of state an order will hold: the formulas of the store, walked without tensors.

Always true: for the same order and units, the prediction equals what `StateStore.count` measures, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_branch.plan.activations import ActivationSizes, Precision, StageShape, activation_sizes
from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.plan import Unit
from megatron_branch.plan.shard import Shard, shard_unit
from megatron_branch.schedule.actions import Action
from megatron_branch.schedule.orders import releases
from megatron_branch.state.bytes import ByteCount


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes per token on one rank.

    Attributes:
        kv: keys and values of all layers of the stage, local KV heads, in the model's dtype.
        adjoint: the same in the accumulation dtype.
        stage_input: hidden states entering the stage; 0 on the first stage.
        activations: of retained graphs.
    """

    kv: int
    adjoint: int
    stage_input: int
    activations: ActivationSizes


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
    )


def predict_state(
    order: Sequence[Action],
    units: Sequence[Unit],
    sizes: StateSizes,
    *,
    cp: int,
    cp_rank: int,
    ulysses: int = 1,
    sequence_parallel: int = 1,
) -> ByteCount:
    """Peak bytes by kind of a training order on one rank.

    Args:
        order: the actions of its stage.
        units: those of its data-parallel rank.
        sizes: bytes per token.
        cp: number of context-parallel ranks; `cp_rank` is this one.
        ulysses: size of the Ulysses groups among them.
        sequence_parallel: tensor-parallel ranks that share the tokens between layers; 1: each has all of them.
    """

    def shard(unit: Unit, ulysses: int = 1) -> Shard:
        segments = tuple(segment.tokens for segment in unit.segments)
        return shard_unit(segments, cp=cp, rank=cp_rank, ulysses=ulysses, align=sequence_parallel)

    count = ByteCount()
    held: dict[int, dict[str, int]] = {}
    for action, done in zip(order, releases(order, units), strict=True):
        if action.kind == "capture":
            unit = units[action.unit]
            local = shard(unit).local
            again = unit.replayed and not unit.retained
            held[unit.index] = {
                "stage_input": local // sequence_parallel * sizes.stage_input if again else 0,
                "state": shard(unit, ulysses).owned * sizes.kv,
                "activations": sizes.activations.of(unit, local) if unit.retained else 0,
            }
            for kind, size in held[unit.index].items():
                count.add(kind, size)
        elif action.kind != "idle" and action.phase != "forward":
            for prefix in units[action.unit].context:
                if units[prefix].replayed and "adjoint" not in held[prefix]:
                    held[prefix]["adjoint"] = shard(units[prefix], ulysses).owned * sizes.adjoint
                    count.add("adjoint", held[prefix]["adjoint"])
        for prefix in done:
            for kind, size in held.pop(prefix).items():
                count.add(kind, -size)
    return count
