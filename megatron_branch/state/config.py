"""Section `state` of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StateConfig(BaseModel):
    """Where keys and values, their adjoints and stage inputs of captured prefixes live."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    placement: Literal["device", "host", "nvme", "auto"] = Field(
        default="device",
        description="where the state of prefixes lives between passes; host: in main memory, pinned where the system "
        "allows; nvme: in files; auto: per rank and step what fits `state.device_budget_bytes` with the least time "
        "in copies",
    )
    device_budget_bytes: int | None = Field(
        default=None,
        ge=0,
        description="most bytes that state may take on the device of a rank; for auto, which needs it",
    )
    nvme_path: Path | None = Field(
        default=None, description="folder for state in files, on a local disk; for nvme, and for auto where wanted"
    )

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> StateConfig:
        if self.placement == "nvme" and self.nvme_path is None:
            raise ValueError("state.placement=nvme needs state.nvme_path; name a folder on a local disk")
        if self.placement == "auto" and self.device_budget_bytes is None:
            raise ValueError(
                "state.placement=auto needs state.device_budget_bytes: what activations and gradients will take is not "
                "known when it chooses; set what they leave over"
            )
        if self.placement in ("device", "host") and self.nvme_path is not None:
            raise ValueError(
                f"state.nvme_path={self.nvme_path} has no effect with state.placement={self.placement}; "
                "remove it or set state.placement to nvme or auto"
            )
        if self.placement != "auto" and self.device_budget_bytes is not None:
            raise ValueError(
                f"state.device_budget_bytes={self.device_budget_bytes} has no effect with "
                f"state.placement={self.placement}; remove it or set state.placement=auto"
            )
        return self
