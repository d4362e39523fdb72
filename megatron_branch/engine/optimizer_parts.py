"""Where DeepSpeed keeps the masters and moments of a parameter, at each ZeRO stage: as whole tensors, in and out.

Every stage gives the wrapped optimizer flat tensors, of which a parameter has a part on some or all ranks of dp * cp.
One table of parts serves the masters and, at the same places, each moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_branch.engine.config import OptimizerConfig
from megatron_branch.engine.gradients import whole_shape
from megatron_branch.engine.groups import Groups


@dataclass(frozen=True, slots=True)
class Part:
    """`length` elements: from `first` on in the flattened parameter, from `at` on in the tensor that is updated."""

    master: Tensor
    at: int
    first: int
    length: int


class OptimizerParts:
    """Masters, moments and the count of updates of one engine.

    Args:
        engine: DeepSpeed's.
        config: of the optimizer that it wraps.
        groups: the axes; dp * cp ranks share a parameter's state from stage 1 on.
        stage: of ZeRO.

    Raises:
        ValueError: the state is on NVMe, out of reach.
    """

    def __init__(self, engine: Any, config: OptimizerConfig, groups: Groups, *, stage: int) -> None:
        wrapper = engine.optimizer
        if getattr(wrapper, "swap_optimizer", False):
            raise ValueError(
                "zero_optimization.offload_optimizer.device = nvme: checkpoints do not reach moments on NVMe; set it "
                "to cpu, or checkpoint.at_end=false and checkpoint.every_steps=null"
            )
        self._base: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        self._config, self._groups, self._stage = config, groups, stage
        # DeepSpeed's stage 3 hands the optimizer one of its tensors at a time.
        self._masters: list[Tensor] = (
            list(wrapper.fp32_partitioned_groups_flat)
            if stage == 3
            else [master for group in self._base.param_groups for master in group["params"]]
        )
        self._parts: dict[nn.Parameter, Part | None] = {}
        for parameter in engine.module.parameters():
            self._parts[parameter] = self._part(wrapper, parameter)
        if stage == 0 and hasattr(wrapper, "fp16_groups"):
            self._parts.update(_low_precision(wrapper))

    @property
    def moments(self) -> tuple[str, ...]:
        """What the optimizer keeps beside each master."""
        if self._config.name == "sgd":
            return ("momentum_buffer",) if self._config.momentum else ()
        return ("exp_avg", "exp_avg_sq")

    def updates(self) -> int:
        """How many updates Adam's bias correction counts; 0 for an optimizer that does not count."""
        state = self._base.state[self._masters[0]]
        return int(state.get("step", self._base.param_groups[0].get("step", 0)))

    def read(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """The whole master or moment of this rank's shard (collective over dp * cp from stage 1 on)."""
        part = self._parts[parameter]
        shape = whole_shape(parameter)
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        whole = torch.zeros(shape.numel(), dtype=dtype, device=parameter.device)
        if part is not None:
            whole[part.first : part.first + part.length] = self._view(part, moment).to(whole)
        if self._stage > 0:
            dist.all_reduce(whole, group=self._groups.dp_cp.group)
        return whole.view(shape)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, whole: Tensor, moment: str | None = None) -> None:
        """Put this rank's part of a whole master or moment in its place."""
        part = self._parts[parameter]
        if part is not None:
            self._view(part, moment).copy_(whole.reshape(-1)[part.first : part.first + part.length])

    def prepare(self, updates: int) -> None:
        """Make moments (zero), as an optimizer that counted `updates`; `write` fills them."""
        if self._config.name in ("fused_adam", "apex_fused_adam"):
            for group in self._base.param_groups:
                group["step"] = updates
        for master in self._masters:
            state = self._base.state[master]
            for moment in self.moments:
                state[moment] = torch.zeros_like(master, requires_grad=False)
            if self._config.name == "adamw":
                state["step"] = torch.tensor(float(updates), dtype=torch.float32)
            elif self._config.name == "cpu_adam":
                state["step"] = updates

    def _view(self, part: Part, moment: str | None) -> Tensor:
        tensor = part.master if moment is None else self._base.state[part.master][moment]
        return tensor.detach().view(-1)[part.at : part.at + part.length]

    def _part(self, wrapper: Any, parameter: nn.Parameter) -> Part | None:
        """The part on this rank; None when others hold all of it."""
        elements = whole_shape(parameter).numel()
        if self._stage == 3:
            index, at, length = wrapper.grad_position[wrapper.get_param_id(parameter)]
            first = length * self._groups.dp_cp.rank
            length = max(0, min(length, elements - first))  # the last parts are padded
            return Part(wrapper.fp32_partitioned_groups_flat[index], int(at), first, length)
        if self._stage > 0:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            (master,) = self._base.param_groups[mapping.param_group_index]["params"]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            return Part(master, here.start, there.start, there.numel)
        return Part(parameter, 0, 0, elements)


def _low_precision(wrapper: Any) -> dict[nn.Parameter, Part]:
    """Without ZeRO, parameters of low precision have masters one by one, or flat in one for a fused optimizer."""
    parts = {}
    for number, parameters in enumerate(wrapper.fp16_groups):
        at = 0
        for index, parameter in enumerate(parameters):
            if hasattr(wrapper, "fp32_groups_flat"):
                parts[parameter] = Part(wrapper.fp32_groups_flat[number], at, 0, parameter.numel())
                at += parameter.numel()
            else:
                parts[parameter] = Part(wrapper.fp32_groups[number][index], 0, 0, parameter.numel())
    return parts
