"""Section `objective` of the configuration: what is maximised."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AdvantageEstimator = Literal["grpo", "grpo_no_std", "rloo"]
KlEstimator = Literal["k1", "k2", "k3"]


class ObjectiveConfig(BaseModel):
    """Clipped policy gradient with optional KL and entropy terms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    advantage: AdvantageEstimator = Field(
        default="grpo",
        description="estimator over the group, for rows that give no advantage: (reward - mean) / std, the same "
        "without std, or reward - mean of the other rollouts",
    )
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean", description="how token losses become one number, over the whole step"
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float | None = Field(
        default=None, ge=0, description="the ratio is clipped above 1 + clip_high; null: as clip_low"
    )
    kl_coefficient: float = Field(default=0.0, ge=0, description="weight of the KL to `ref_logprobs` in the loss")
    kl_estimator: KlEstimator = Field(default="k3", description="estimator of that KL")
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus in the loss")
    temperature: float = Field(
        default=1.0, gt=0, description="logits are divided by it: the temperature of the rollouts' log-probs"
    )
    old_logprobs: Literal["file", "recompute", "current"] = Field(
        default="file",
        description="old log-probs: the row's values (the current ones, detached, for rows without), a scoring pass "
        "of our own before the step, or always the current ones",
    )
    head_chunk_tokens: int = Field(default=1024, ge=1, description="positions whose logits exist at the same time")

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> ObjectiveConfig:
        if self.kl_estimator != "k3" and self.kl_coefficient == 0:
            raise ValueError(
                f"objective.kl_estimator={self.kl_estimator} has no effect with objective.kl_coefficient=0; "
                "remove it or set a coefficient"
            )
        return self

    @property
    def clip_above(self) -> float:
        """`clip_high`, or `clip_low` where it is not given."""
        return self.clip_low if self.clip_high is None else self.clip_high
