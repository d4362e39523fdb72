"""Section `attention` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AttentionConfig(BaseModel):
    """Which kernels compute attention."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backend: Literal["auto", "aten", "cudnn", "flash2", "flash3"] = Field(
        default="auto",
        description="attention kernels; aten: FlashAttention inside PyTorch, on CPUs and GPUs; auto: the same; on GPUs "
        "also cudnn (inside PyTorch), flash2 and flash3 (packages of FlashAttention, where installed)",
    )
