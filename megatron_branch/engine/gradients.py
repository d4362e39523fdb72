"""Gradients of one step on one rank: where they accumulate, and what must be summed once before they are whole.

A step is many backward passes. For float32 and float64 models autograd's own accumulation into `.grad` is exact enough;
for bfloat16 each pass's gradient is added into a float32 buffer, since a running bfloat16 sum loses small terms.

Always true, after `finish` and the data-parallel sum:
- every rank that holds a copy of a parameter (or of one shard) holds the same gradient;
- nothing was divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.engine.groups import Groups

# Each tensor-parallel rank normalises its own heads, so the gradient of these replicated weights is a partial sum.
PARTIAL_OVER_TP = ("q_layernorm.weight", "k_layernorm.weight")


class Gradients:
    """Local gradients of a model over the passes of a step."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        self._groups = groups
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if _low(parameter):
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._sums[name].add_(parameter.grad)
        parameter.grad = None

    def start(self) -> None:
        """Begin a step at zero.

        All buffers exist before the first pass, so that the peak of memory does not depend on the number of passes; a
        parameter that DeepSpeed has partitioned gets its gradient from the first pass.
        """
        self.clear()
        for name, parameter in self._parameters.items():
            if _low(parameter):
                self._sums[name] = _zeros(parameter)
            elif not hasattr(parameter, "ds_shape"):
                parameter.grad = _zeros(parameter)

    def clear(self) -> None:
        """Forget everything, also after an exception in the middle of a step."""
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def of(self, name: str) -> Tensor | None:
        """The local sum of a parameter's gradient; None when no pass touched it."""
        if name in self._sums:
            return self._sums[name]
        return self._parameters[name].grad

    def finish(self) -> None:
        """Sum what tensor-parallel ranks and the two copies of a tied embedding hold in parts (collective, once a
        step).

        A parameter without a gradient counts as zero, so that ranks with different work make the same calls.
        """
        for name, parameter in self._parameters.items():
            in_parts = name.endswith(PARTIAL_OVER_TP) or getattr(parameter, "sequence_parallel", False)
            partial = self._groups.tp.size > 1 and in_parts
            tied = self._groups.embedding is not None and getattr(parameter, "tied_copy", None) is not None
            if not partial and not tied:
                continue
            gradient = self.or_zero(name)
            if partial:
                dist.all_reduce(gradient, group=self._groups.tp.group)
            if tied and self._groups.embedding is not None:
                dist.all_reduce(gradient, group=self._groups.embedding.group)

    def or_zero(self, name: str) -> Tensor:
        """The local sum, made zero (and kept) where there is none."""
        gradient = self.of(name)
        if gradient is None:
            gradient = self._sums[name] = _zeros(self._parameters[name])
        return gradient

    def release(self, name: str) -> None:
        """Free one buffer, whose content the host has taken over."""
        self._sums.pop(name, None)

    def finite(self) -> bool:
        """Whether every rank's gradients are free of NaN and infinity (collective over all ranks)."""
        bad = [~torch.isfinite(total).all() for name in self._parameters if (total := self.of(name)) is not None]
        count = torch.stack(bad).sum() if bad else torch.zeros((), dtype=torch.int64)
        count = count.to(next(iter(self._parameters.values())).device)
        dist.all_reduce(count)
        return count.item() == 0

    def names(self) -> tuple[str, ...]:
        """All trainable parameters, in the model's order."""
        return tuple(self._parameters)


def _low(parameter: nn.Parameter) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def _zeros(parameter: nn.Parameter) -> Tensor:
    """Of the whole parameter, in the accumulation dtype."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed empties partitioned parameters
    return torch.zeros(shape, dtype=torch.float32 if _low(parameter) else parameter.dtype, device=parameter.device)


def global_norm(model: nn.Module, groups: Groups, gradient: Callable[[str, nn.Parameter], Tensor]) -> float:
    """L2 norm over the whole model of gradients that are already summed over data-parallel ranks.

    Every parameter counts once: shards on their own rank, replicated ones on tensor-parallel rank 0, the embedding's
    copy on the last stage not at all.

    Args:
        model: this rank's shard.
        groups: the axes.
        gradient: this rank's shard of a parameter's gradient; may be collective over the ranks that hold the same
            shard.
    """
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        shared = not getattr(parameter, "tensor_model_parallel", False) and groups.tp.rank != 0
        if shared or getattr(parameter, "tied_copy", None) is True:
            continue
        total += torch.linalg.vector_norm(gradient(name, parameter), dtype=torch.float64).square().cpu()
    total = total.to(next(model.parameters()).device)
    dist.all_reduce(total, group=groups.model.group)
    return math.sqrt(total.item())
