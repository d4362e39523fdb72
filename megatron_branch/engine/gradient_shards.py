"""Gradients of one step, reduced after each pass: a rank keeps 1 / (dp * cp) of every sum.

While a pass goes backward, each parameter's gradient is summed over the dp * cp ranks as soon as autograd has it, in
float32 (float64 for a float64 model), added to this rank's part, and dropped. What is whole at any moment is one
parameter's gradient, and what autograd itself holds: the first of the two terms of a tied embedding on one stage.

The parts are those of ZeRO-3: the parameter flattened, padded to a multiple of the ranks, cut into equal pieces.

Always true:
- all dp * cp ranks reduce the same parameters in the same order, which equal passes give (`ZeroConfig.matched`); an
  order that differs is an error on each of them before any weight changes;
- nothing is divided;
- after `finish` every rank that holds a copy of a parameter (or of one shard) has, with the others, the same gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.attention.mirror import all_gather_single, reduce_scatter_single
from megatron_branch.engine.gradients import all_finite, partial_over, sum_dtype, whole_shape
from megatron_branch.engine.groups import Groups

Storage = Callable[[nn.Parameter, int], Tensor]


class GradientShards:
    """This rank's parts of the gradients of a model over the passes of a step.

    Args:
        model: this rank's shard.
        groups: the axes; `dp_cp` are the ranks that share each gradient.
        storage: called at the start of a step with a parameter and the number of elements of its part, returns the
            flat tensor in which the part is summed (its content is overwritten); by default new memory.
    """

    def __init__(self, model: nn.Module, groups: Groups, *, storage: Storage | None = None) -> None:
        self._groups = groups
        self._storage = storage or _new
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parts: dict[str, Tensor] = {}
        self._order = hashlib.sha256()
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._reduce(name, p))

    def _reduce(self, name: str, parameter: nn.Parameter) -> None:
        """Add this pass's gradient of one parameter, summed over the ranks (collective over `dp_cp`)."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        part = self._parts[name]
        received = torch.empty_like(part)
        reduce_scatter_single(received, self._padded(gradient, part), group=self._groups.dp_cp.group)
        part.add_(received)
        self._order.update(name.encode() + b"\n")

    def _padded(self, gradient: Tensor, part: Tensor) -> Tensor:
        """The whole gradient, flat, in the parts' dtype, as long as all parts together."""
        flat = gradient.reshape(-1)
        length = part.numel() * self._groups.dp_cp.size
        if flat.numel() == length:
            return flat.to(part.dtype)
        padded = part.new_zeros(length)
        padded[: flat.numel()] = flat
        return padded

    def start(self) -> None:
        """Begin a step at zero."""
        self.clear()
        for name, parameter in self._parameters.items():
            elements = -(-math.prod(whole_shape(parameter)) // self._groups.dp_cp.size)
            part = self._storage(parameter, elements)
            assert part.shape == (elements,) and part.dtype == sum_dtype(parameter), f"storage of {name}"
            self._parts[name] = part.zero_()

    def clear(self) -> None:
        """Forget everything, also after an exception in the middle of a step."""
        self._parts.clear()
        self._order = hashlib.sha256()
        for parameter in self._parameters.values():
            parameter.grad = None

    def part(self, name: str) -> Tensor:
        """This rank's part, flat and padded."""
        return self._parts[name]

    def finish(self) -> None:
        """Sum what tensor-parallel ranks and the two copies of a tied embedding hold in parts (collective, once a
        step).

        Raises:
            RuntimeError: the ranks reduced different parameters, or in different orders; on every rank of `dp_cp`.
        """
        self._agree_on_order()
        for name, parameter in self._parameters.items():
            for axis in partial_over(name, parameter, self._groups):
                dist.all_reduce(self._parts[name], group=axis.group)

    def _agree_on_order(self) -> None:
        number = int.from_bytes(self._order.digest()[:7])
        device = next(iter(self._parameters.values())).device
        lowest = torch.tensor([number, -number], dtype=torch.int64, device=device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._groups.dp_cp.group)
        if lowest[0].item() != -lowest[1].item():
            raise RuntimeError(
                "data-parallel and context-parallel ranks reduced gradients in different orders; no weight was "
                "changed. Set zero.reduce=step and report this"
            )

    def whole(self, name: str) -> Tensor:
        """The sum of a parameter's gradient in its shape (collective over `dp_cp`)."""
        part, shape = self._parts[name], whole_shape(self._parameters[name])
        every = part.new_empty(part.numel() * self._groups.dp_cp.size)
        all_gather_single(every, part, group=self._groups.dp_cp.group)
        return every[: math.prod(shape)].view(shape)

    def release(self, name: str) -> None:
        """Forget one part, whose content the host has taken over."""
        del self._parts[name]

    def finite(self) -> bool:
        """Whether every rank's parts are free of NaN and infinity (collective over all ranks)."""
        return all_finite(self._parts.values(), next(iter(self._parameters.values())).device)

    def names(self) -> tuple[str, ...]:
        """All trainable parameters, in the model's order."""
        return tuple(self._parameters)


def _new(parameter: nn.Parameter, elements: int) -> Tensor:
    return torch.empty(elements, dtype=sum_dtype(parameter), device=parameter.device)
