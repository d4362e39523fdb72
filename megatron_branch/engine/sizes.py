"""Bytes per token of a run's stages, by the formulas of the plan and the state."""

from __future__ import annotations

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
    layers = stage_layers(arch, sizes.pp)
    shapes = (
        StageShape(
            count,
            first=stage == 0,
            last=stage == sizes.pp - 1,
            tp=sizes.tp,
            cp=sizes.cp,
            ulysses=sizes.ulysses,
            sequence=sizes.sequence_ranks,
        )
        for stage, count in enumerate(layers)
    )
    return tuple(state_sizes(arch.shape(), stage, precision, qk_norm=arch.qk_norm) for stage in shapes)
