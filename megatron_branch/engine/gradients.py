"""Gradients of one step, whole on each rank: where they accumulate, and what must be summed once at its end.

A step is many backward passes. For float32 and float64 models autograd's own accumulation into `.grad` is exact enough;
for bfloat16 each pass's gradient is added into a float32 buffer, since a running bfloat16 sum loses small terms.

Always true, after `finish` and the data-parallel sum:
- every rank that holds a copy of a parameter (or of one shard) holds the same gradient;
- nothing was divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.engine.groups import Axis, Groups

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
            for axis in partial_over(name, parameter, self._groups):
                dist.all_reduce(self.or_zero(name), group=axis.group)

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
        """Whether every rank's gradients are finite, their norm too (collective over all ranks)."""
        totals = [total for name in self._parameters if (total := self.of(name)) is not None]
        return all_finite(totals, next(iter(self._parameters.values())).device)

    def names(self) -> tuple[str, ...]:
        """All trainable parameters, in the model's order."""
        return tuple(self._parameters)


def _low(parameter: nn.Parameter) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """In which gradients are summed: float32 for parameters of lower precision, else the parameter's own."""
    return torch.float32 if _low(parameter) else parameter.dtype


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Also of a parameter that DeepSpeed has partitioned, and thereby emptied."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(whole_shape(parameter), dtype=sum_dtype(parameter), device=parameter.device)


def partial_over(name: str, parameter: nn.Parameter, groups: Groups) -> list[Axis]:
    """The axes over which ranks hold a parameter's gradient in parts that must be summed, beside `dp_cp`."""
    axes = []
    in_parts = name.endswith(PARTIAL_OVER_TP) or getattr(parameter, "sequence_parallel", False)
    if groups.tp.size > 1 and in_parts:
        axes.append(groups.tp)
    if groups.embedding is not None and getattr(parameter, "tied_copy", None) is not None:
        axes.append(groups.embedding)
    return axes


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether the tensors of every rank are finite, and the norm of their sum over ranks can be told in their dtype
    (collective over all ranks).

    The square of that norm is at most the number of ranks times the sum of all squares, and a tensor's squares sum to
    at most the largest of them times its elements. Norms of gradients are computed in the gradients' own dtype.
    """
    bound = torch.zeros(2, dtype=torch.float64, device=device)
    bound[1] = torch.finfo(torch.float32).max
    for tensor in tensors:
        if tensor.numel():
            largest = torch.linalg.vector_norm(tensor, ord=math.inf).to(torch.float64)
            bound[0] += tensor.numel() * largest.square()
            bound[1] = torch.finfo(tensor.dtype).max
    dist.all_reduce(bound[:1])
    dist.all_reduce(bound[1:], op=dist.ReduceOp.MAX)
    return bool(dist.get_world_size() * bound[0] < bound[1])  # NaN is below nothing


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
