"""Bytes per token of a run's stages, by the formulas of the plan and the state."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture, stage_layers
from megatron_branch.plan.activations import Precision, StageShape
from megatron_branch.state.predict import StateSizes, state_sizes

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def stage_sizes(config: Config, arch: Architecture, *, device: str) -> tuple[StateSizes, ...]:
    """Per pipeline stage, what one rank keeps per token.

    Args:
        config: parallel sizes and dtype.
        arch: the model.
        device: `cpu`, or anything else for a GPU, where norms are one kernel.
    """
    sizes = config.parallel
    precision = Precision(DTYPE_BYTES[config.model.dtype], fused_norms=device != "cpu")
    stages = stage_shapes(
        stage_layers(arch, sizes.pp),
        tp=sizes.tp,
        cp=sizes.cp,
        ulysses=sizes.ulysses,
        sequence=sizes.sequence_ranks,
    )
    return tuple(state_sizes(arch.shape(), stage, precision, qk_norm=arch.qk_norm) for stage in stages)


def stage_shapes(layers: Sequence[int], *, tp: int, cp: int, ulysses: int, sequence: int) -> tuple[StageShape, ...]:
    """What one rank of each pipeline stage computes, from the layers of each; see `StageShape`."""
    last = len(layers) - 1
    return tuple(
        StageShape(count, first=stage == 0, last=stage == last, tp=tp, cp=cp, ulysses=ulysses, sequence=sequence)
        for stage, count in enumerate(layers)
    )
