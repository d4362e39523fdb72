"""Section `tracking` of the configuration: where a run writes what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrackingConfig(BaseModel):
    """The run folder, Weights & Biases, and what the metrics need to know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run_dir: Path = Field(
        default=Path("runs/default"),
        description="folder of the run: metrics.jsonl, config.yaml, checkpoints/, wandb/, pictures, timeline/",
    )
    name: str | None = Field(default=None, description="name of the run; null: the last part of `tracking.run_dir`")
    wandb: Literal["online", "offline", "disabled"] = Field(
        default="disabled", description="Weights & Biases mode; WANDB_MODE may turn online into offline or disabled"
    )
    wandb_required: bool = Field(
        default=False, description="stop when W&B cannot be reached; otherwise warn once and record offline"
    )
    project: str = Field(default="megatron-branch", description="W&B project")
    entity: str | None = Field(default=None, description="W&B team or user; null: the account's default")
    plot_schedule: bool = Field(
        default=False, description="draw the first step's schedule to schedule.png (extra `plot`)"
    )
    profile_steps: int = Field(
        default=0,
        ge=0,
        description="so many first steps are recorded by action: timeline/step_N.json (Chrome trace of all ranks), "
        "step_N.png (stages, simulated and measured; extra `plot`)",
    )
    peak_flops: float | None = Field(
        default=None, gt=0, description="peak FLOP/s of one device at `model.dtype`; null: no mfu and hfu"
    )

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> TrackingConfig:
        if self.wandb_required and self.wandb != "online":
            raise ValueError(
                f"tracking.wandb_required=true has no effect with tracking.wandb={self.wandb}; "
                "remove it or set tracking.wandb=online"
            )
        return self

    @property
    def run_name(self) -> str:
        """`name`, or the last part of `run_dir`."""
        return self.name or self.run_dir.resolve().name
