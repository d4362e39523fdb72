"""What the user and the layout allow a plan to do.

Always true:
- `pack_tokens` never widens a pass beyond `chunk_tokens`;
- a limit of None means unlimited.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_branch.plan.plan import Activations, Gradient


class BranchConfig(BaseModel):
    """How trees of rollouts are computed; the `branch:` section of the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gradient: Gradient = Field(
        default="exact",
        description="exact: the gradient of dense training; detached: the state of leading loss-free positions is a "
        "constant; dense: every rollout alone, full sequence",
    )
    gate: bool = Field(
        default=True,
        description="run the rollouts of a tree alone where sharing would not save 3 %: the same gradient; only for "
        "exact, because elsewhere it would be another one",
    )
    activations: Activations = Field(
        default="recompute",
        description="recompute: a captured chunk is run again from its stage input in its replay; retain: it keeps its "
        "graph, and the replay is a backward alone; auto: retain what fits `branch.activation_budget_bytes` "
        "(not used by dense)",
    )
    activation_budget_bytes: int | None = Field(
        default=None, ge=0, description="most bytes of retained graphs on a rank; required for auto, only for auto"
    )
    recompute_layers: bool = Field(
        default=False,
        description="passes that go backward at once (tails, replays of chunks that are not retained) keep one hidden "
        "state per layer, and compute each layer again in their backward",
    )
    chunk_tokens: int | None = Field(
        default=None, ge=1, description="most tokens of one node in one pass (null: unlimited; not used by dense)"
    )
    pack_tokens: int = Field(
        default=2048, ge=1, description="most tokens of sibling tails packed into one pass (not used by dense)"
    )

    @model_validator(mode="after")
    def _budget_goes_with_auto(self) -> BranchConfig:
        auto, budget = self.activations == "auto", self.activation_budget_bytes
        if auto and budget is None:
            raise ValueError(
                "branch.activations=auto needs branch.activation_budget_bytes, the most bytes of retained graphs on a "
                "rank; set it, or choose retain or recompute"
            )
        if not auto and budget is not None:
            raise ValueError(
                f"branch.activation_budget_bytes={budget} has no effect with branch.activations={self.activations}; "
                "remove it or set branch.activations=auto"
            )
        return self

    @property
    def pack_limit(self) -> int:
        """Most tokens of a pass that holds several tails."""
        return self.pack_tokens if self.chunk_tokens is None else min(self.pack_tokens, self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """The mesh axes that planning and ordering depend on.

    Attributes:
        dp: data-parallel ranks, over which whole trees are spread.
        cp: context-parallel ranks, each with a share of every pass.
        pp: pipeline stages.
        matched_passes: every data-parallel rank must make the same passes (ZeRO-3 gathers weights inside them,
            `zero.reduce: pass` reduces gradients).
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    matched_passes: bool = False

    def __post_init__(self) -> None:
        for axis, size in (("dp", self.dp), ("cp", self.cp), ("pp", self.pp)):
            if size < 1:
                raise ValueError(f"parallel.{axis}={size} must be at least 1")
        if self.matched_passes and self.pp > 1:
            raise ValueError(
                f"matched passes (ZeRO-3, zero.reduce=pass) with pp={self.pp} are not supported; use pp=1, or ZeRO 0-2 "
                "with zero.reduce=step"
            )
