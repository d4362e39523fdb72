"""DeepSpeed as the host of a step: partitioned optimizer state, gradients and parameters.

The schedule calls the inner module with plain autograd. Once, after the last replay, gradients are completed over
tensor-parallel ranks and tied embeddings. By `zero.reduce`:

- step: they accumulate locally and are then handed to DeepSpeed, which averages them over the ranks that hold the same
  parameters. `loss_scale` undoes that average; it is the only place that does.
- pass: they are summed over those ranks during every pass, so DeepSpeed reduces nothing and divides nothing, and
  `loss_scale` is 1. With ZeRO-3 a rank's parts are DeepSpeed's own partitions; with ZeRO-2, whose partitions cut
  through parameters elsewhere, the parts are gathered and handed over one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad
from torch import Tensor, nn

from megatron_branch.config import Config
from megatron_branch.engine.deepspeed_config import engine_settings
from megatron_branch.engine.gradient_shards import GradientShards
from megatron_branch.engine.gradients import Gradients, global_norm
from megatron_branch.engine.groups import Groups
from megatron_branch.engine.optimizer_parts import OptimizerParts
from megatron_branch.engine.optimizers import build_optimizer, learning_rate
from megatron_branch.schedule.runner import Timers
from megatron_branch.state.store import StateStore


class MegatronUnits:
    """The groups in the form that DeepSpeed asks for (`mpu`)."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.dp_cp.group

    def get_data_parallel_rank(self) -> int:
        return self._groups.dp_cp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.dp_cp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.model.group

    def get_model_parallel_rank(self) -> int:
        return self._groups.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self._groups.model.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tp.group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.pp.group

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.pp.size


class DeepSpeedHost:
    """One DeepSpeed engine around this rank's shard of the model.

    Args:
        model: the shard, weights loaded.
        config: optimizer, ZeRO stage, clipping.
        groups: the axes.
        store: the states, so that weights do not change while one is open.
        timers: the reduction is timed as `optimizer`.
        deepspeed_content: the user's DeepSpeed file.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        groups: Groups,
        *,
        store: StateStore,
        timers: Timers,
        deepspeed_content: dict[str, Any] | None = None,
    ) -> None:
        self._config, self._groups, self._store, self._timers = config, groups, store, timers
        self.stage = config.zero.stage
        self.loss_scale = float(groups.dp_cp.size) if config.zero.reduce == "step" else 1.0
        if next(model.parameters()).device.type == "cpu":
            # An all-reduce that only inference uses; building it takes a minute, a C++ compiler and ninja.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = build_optimizer(config.optimizer, model.parameters())
        settings = engine_settings(config, deepspeed_content or {})
        if self.stage == 0:
            # Without ZeRO DeepSpeed clips by another norm than the whole model's: in float32 it leaves out what
            # tensor-parallel ranks replicate on all stages but the first, and counts the tied embedding's copy;
            # in bfloat16 the ranks of a model clip by different norms. So `step` clips.
            settings["gradient_clipping"] = 0.0
        self.engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=settings,
            mpu=MegatronUnits(groups),
            dist_init_required=False,
        )
        self._gradients: Gradients | GradientShards
        if config.zero.reduce == "step":
            self._gradients = Gradients(self.engine.module, groups)
        else:
            storage = _partition if self.stage == 3 else None
            self._gradients = GradientShards(self.engine.module, groups, storage=storage)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Passes inside belong to one optimizer step; on exit DeepSpeed holds the reduced gradients.

        After an exception the engine must not step; the next `accumulate` starts clean.

        Raises:
            FloatingPointError: a gradient is not finite (on every rank alike).
        """
        self._gradients.start()
        failed = True
        try:
            with ExitStack() as timing:
                with self.engine.coalesce_grad_reduction() if self.stage > 0 else nullcontext():
                    try:
                        yield
                        timing.enter_context(self._timers("optimizer"))
                        self._gradients.finish()
                        self._refuse_non_finite()
                        if isinstance(self._gradients, Gradients):
                            self._hand_over(self._gradients)
                    except BaseException:
                        self._gradients.clear()  # leaving the block reduces what it finds
                        raise
                if self.stage == 0:
                    self.engine.allreduce_gradients()
                if isinstance(self._gradients, GradientShards):
                    self._place(self._gradients)
            failed = False
        finally:
            if failed:
                self._gradients.clear()
                self.engine.zero_grad()

    def _refuse_non_finite(self) -> None:
        """Raise on every rank, before any weight changes, when a gradient of any rank is not a number."""
        if not self._gradients.finite():
            raise FloatingPointError(
                "a gradient is NaN, infinite or too large for its norm; no weight was changed. Look at the step's "
                "advantages and old log-probs (a ratio overflows where they are far from the model's), at optimizer.lr "
                "and at model.dtype"
            )

    def _hand_over(self, sums: Gradients) -> None:
        """Make every parameter's sum its `.grad`, in the parameter's dtype, on every rank: DeepSpeed reduces those."""
        for name, parameter in self.engine.module.named_parameters():
            total = sums.or_zero(name)
            if parameter.grad is total:
                continue
            with self._whole(parameter):
                parameter.grad = total.to(parameter.dtype)
            del total
            sums.release(name)

    def _place(self, shards: GradientShards) -> None:
        """Put reduced gradients where DeepSpeed looks for them. It found none to reduce, and holds zeros; with ZeRO-3
        it holds the parts themselves."""
        for name, parameter in self.engine.module.named_parameters():
            if self.stage == 2:
                safe_set_full_grad(parameter, shards.whole(name))
            shards.release(name)

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of a parameter's reduced gradient, between `accumulate` and `step` (collective)."""
        gradient = safe_get_full_grad(parameter)
        assert gradient is not None, f"DeepSpeed holds no gradient of {name}"
        return gradient.view(getattr(parameter, "ds_shape", parameter.shape))

    def grad_norm(self) -> float:
        """L2 norm over the whole model of the reduced gradients (collective), before clipping."""
        return global_norm(self.engine.module, self._groups, self.gradient)

    def step(self, *, number: int, total_steps: int) -> tuple[float, float]:
        """Clip and update.

        Args:
            number: of the step, from 1.
            total_steps: of the run, for the learning-rate schedule.

        Returns:
            the learning rate used, and the gradient norm before clipping.
        """
        self._store.refuse_inside_step("an optimizer step")
        rate = learning_rate(self._config.optimizer, step=number, total_steps=total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self.stage == 0:
            norm = self.grad_norm()
            self._clip(norm)
            self.engine.step()
        else:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
        return rate, norm

    def _clip(self, norm: float) -> None:
        """Scale the reduced gradients down to the largest norm allowed."""
        limit = self._config.optimizer.clip_grad
        if 0 < limit < norm:
            torch._foreach_mul_([parameter.grad for parameter in self.engine.module.parameters()], limit / norm)

    def weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of a weight, gathered where parameters are partitioned (collective)."""
        with self._whole(parameter):
            return parameter.detach().clone()

    def _whole(self, parameter: nn.Parameter) -> AbstractContextManager[Any]:
        """Gathers a partitioned parameter.

        One that is whole is left alone: DeepSpeed keeps some so until the next pass, and refuses to free them before.
        """
        if self.stage < 3 or parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return nullcontext()
        return deepspeed.zero.GatheredParameters([parameter])

    def parts(self) -> OptimizerParts:
        """Access to masters and moments, between steps.

        Raises:
            ValueError: they cannot be reached.
        """
        self._store.refuse_inside_step("a checkpoint")
        return OptimizerParts(self.engine, self._config.optimizer, self._groups, stage=self.stage)


def _partition(parameter: nn.Parameter, elements: int) -> Tensor:
    """DeepSpeed's own memory for this rank's part of a gradient, with ZeRO-3."""
    partition = safe_get_local_grad(parameter)
    assert partition.shape == (elements,), "DeepSpeed partitions parameters in another way"
    assert partition.data_ptr() == safe_get_local_grad(parameter).data_ptr(), "a copy of DeepSpeed's partition"
    return partition
