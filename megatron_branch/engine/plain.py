"""The host without an optimizer: gradients are summed over data-parallel ranks and left whole on every rank.

For tools and tests, in any dtype. Training goes through `deepspeed_host`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.engine.gradients import Gradients, global_norm
from megatron_branch.engine.groups import Groups


class PlainHost:
    """Accumulates a step's passes and sums once."""

    loss_scale = 1.0

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        self._model, self._groups = model, groups
        self._gradients = Gradients(model, groups)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Passes inside belong to one step; on exit gradients are whole. An exception leaves none behind."""
        self._gradients.start()
        try:
            yield
            self._gradients.finish()
            for name in self._gradients.names():
                dist.all_reduce(self._gradients.or_zero(name), group=self._groups.dp_cp.group)
        except BaseException:
            self._gradients.clear()
            raise

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of a parameter's gradient, in the accumulation dtype."""
        return self._gradients.or_zero(name)

    def grad_norm(self) -> float:
        """L2 norm over the whole model (collective)."""
        return global_norm(self._model, self._groups, self.gradient)
