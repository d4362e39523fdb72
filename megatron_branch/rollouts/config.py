"""Settings of the data.

Always true:
- an unknown key, or a value outside its range, is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """Which rollouts are trained, in which order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollouts: Path = Field(description="JSONL file of rollouts, gzip where the name ends in .gz")
    groups_per_step: int = Field(
        default=8, ge=1, description="groups per optimizer step; the last step of an epoch takes what is left"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the file")
    shuffle: bool = Field(
        default=False,
        description="draw a new order of the groups for each epoch; rows keep file order within their group",
    )
    seed: int = Field(default=0, ge=0, description="of the shuffling")
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="error stops at the first bad row; skip counts it and writes it to FILE.rejected.jsonl",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="a group with a rollout of more tokens than this is dropped as a whole and counted, so that no "
        "baseline changes; nothing is ever cut; null keeps everything",
    )
