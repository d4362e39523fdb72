"""Sections of the configuration that the hosts read: model, parallel sizes, optimizer, ZeRO, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16", "float64"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(BaseModel):
    """Where the weights come from and in which precision the model computes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: Path = Field(description="Hugging Face folder: config.json, weights, tokenizer")
    gguf_file: str | None = Field(default=None, description="GGUF file inside `model.path` to read the weights from")
    dtype: Dtype = Field(default="bfloat16", description="precision of weights and activations")
    host: Literal["megatron", "transformers"] = Field(
        default="megatron",
        description="who computes the layers; transformers: the model's own Hugging Face code, any family with full "
        "attention, over dp and cp",
    )


class ParallelConfig(BaseModel):
    """Sizes of the mesh axes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tp: int = Field(default=1, ge=1, description="tensor parallel ranks")
    cp: int = Field(default=1, ge=1, description="context parallel ranks")
    pp: int = Field(default=1, ge=1, description="pipeline stages")
    dp: int | None = Field(default=None, ge=1, description="data parallel ranks; null: what the other sizes leave over")
    cp_mode: Literal["pass_q", "ulysses"] = Field(
        default="pass_q",
        description="context parallel attention; pass_q: queries visit the state, any number of heads; ulysses: each "
        "rank attends with a share of the heads",
    )
    ulysses_size: int | None = Field(
        default=None,
        ge=1,
        description="ranks that exchange heads with each other, a divisor of `parallel.cp`; groups of this size pass "
        "queries to each other; null: all of `parallel.cp`; only for ulysses",
    )

    sequence_parallel: bool = Field(
        default=False,
        description="between layers a tensor parallel rank has its share of the tokens only: less memory, the same "
        "traffic; needs tp > 1",
    )

    @model_validator(mode="after")
    def _tensor_parallel_ranks_share_tokens(self) -> ParallelConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel=true has no effect with parallel.tp=1: it splits tokens over tensor "
                "parallel ranks; remove it or raise parallel.tp"
            )
        return self

    @model_validator(mode="after")
    def _groups_divide_cp(self) -> ParallelConfig:
        if self.ulysses_size is None:
            return self
        if self.cp_mode != "ulysses":
            raise ValueError(
                f"parallel.ulysses_size={self.ulysses_size} has no effect with parallel.cp_mode={self.cp_mode}; "
                "remove it or set parallel.cp_mode=ulysses"
            )
        if self.cp % self.ulysses_size:
            sizes = ", ".join(str(n) for n in range(1, self.cp + 1) if self.cp % n == 0)
            raise ValueError(
                f"parallel.ulysses_size={self.ulysses_size} does not divide parallel.cp={self.cp}: each rank is in one "
                f"group of this size; set it to one of {sizes}"
            )
        return self

    @property
    def sequence_ranks(self) -> int:
        """Tensor parallel ranks that share the tokens between layers; 1: each has all of them."""
        return self.tp if self.sequence_parallel else 1

    @property
    def ulysses(self) -> int:
        """Ranks that exchange heads with each other; 1: none do."""
        return 1 if self.cp_mode == "pass_q" else self.ulysses_size or self.cp

    def data_parallel(self, world_size: int) -> int:
        """Number of data-parallel ranks among `world_size` ranks.

        Raises:
            ValueError: `dp` is to be derived and the other sizes do not divide `world_size`.
        """
        if self.dp is not None:
            return self.dp
        rest = self.tp * self.cp * self.pp
        if world_size % rest:
            raise ValueError(
                f"parallel sizes pp={self.pp} cp={self.cp} tp={self.tp} multiply to {rest}, which does not divide the "
                f"{world_size} ranks that the launcher started; launch a multiple of {rest} or change a size"
            )
        return world_size // rest


class OptimizerConfig(BaseModel):
    """The optimizer and its learning-rate schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["adamw", "sgd", "fused_adam", "cpu_adam", "apex_fused_adam"] = Field(
        default="adamw",
        description="torch AdamW or SGD; DeepSpeed's fused or CPU Adam; FusedAdam of NVIDIA apex, where installed",
    )
    lr: float = Field(default=1e-6, ge=0, description="learning rate after warm-up")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="decay of Adam's moments; not for sgd")
    eps: float = Field(default=1e-8, gt=0, description="added to Adam's denominator; not for sgd")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay (sgd: added to the gradient)")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum of sgd; for no other optimizer")
    clip_grad: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: clipping off")
    on_nonfinite: Literal["error", "skip"] = Field(
        default="error",
        description="a step whose gradient is not finite ends the run, or changes no weight and is named",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="shape of the learning rate after warm-up, down to `optimizer.min_lr`"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly from 0")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step; not for constant")

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> OptimizerConfig:
        if self.name == "sgd":
            for key in ("betas", "eps"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"optimizer.{key} has no effect with optimizer.name=sgd; remove it")
        elif self.momentum:
            raise ValueError(
                f"optimizer.momentum={self.momentum} has no effect with optimizer.name={self.name}; "
                "remove it or set optimizer.name=sgd"
            )
        if self.schedule == "constant" and self.min_lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr} has no effect with optimizer.schedule=constant; "
                "remove it or choose linear or cosine"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must not exceed optimizer.lr={self.lr}")
        return self


class ZeroConfig(BaseModel):
    """DeepSpeed's partitioning of optimizer state, gradients and parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stage: int = Field(
        default=0, ge=0, le=3, description="0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters"
    )
    reduce: Literal["step", "pass"] = Field(
        default="step",
        description="step: a step's gradients accumulate whole on every rank and are reduced once; pass: they are "
        "reduced during each backward pass, and a rank keeps 1 / (dp * cp) of them (stages 2 and 3)",
    )

    def matched(self, dp: int) -> bool:
        """Whether all data-parallel ranks must make the same passes: collectives over all of them run inside."""
        return self.stage == 3 or (self.reduce == "pass" and dp > 1)


class CheckpointConfig(BaseModel):
    """When to save, and what."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every_steps: int | None = Field(default=None, ge=1, description="steps between checkpoints; null: none on the way")
    at_end: bool = Field(default=True, description="save after the last step")
    export_hf: bool = Field(default=False, description="write a Hugging Face folder beside every checkpoint")
    keep: int | None = Field(default=None, ge=1, description="newest checkpoints to keep, and their exports; null: all")
    resume: str | None = Field(
        default=None,
        description="auto: go on from the newest checkpoint of `tracking.run_dir`, or begin where there is none; a "
        "path: from that one; null: begin, in a folder without checkpoints",
    )
    on_damaged: Literal["error", "previous"] = Field(
        default="error", description="a damaged checkpoint is an error, or the newest whole one before it is taken"
    )

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> CheckpointConfig:
        if self.export_hf and self.every_steps is None and not self.at_end:
            raise ValueError(
                "checkpoint.export_hf=true has no effect when no checkpoint is written; "
                "set checkpoint.at_end=true or checkpoint.every_steps"
            )
        if self.on_damaged == "previous" and self.resume is None:
            raise ValueError(
                "checkpoint.on_damaged=previous has no effect without checkpoint.resume; set it to auto or a path"
            )
        return self
