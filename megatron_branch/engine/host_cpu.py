"""Megatron-core on a machine without a GPU.

Megatron asks for CUDA devices, streams and random states in hundreds of places. `enter` answers them with the CPU's,
once per process, and only when no GPU exists. Nothing else in the package replaces anything of another library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class HostDevice(TorchFunctionMode):
    """`device="cuda"` in a factory call becomes the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def enter() -> torch.device:
    """Make Megatron run on this machine; the device that models live on. Idempotent."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if not isinstance(_active_mode(), HostDevice):
        _answer_cuda_with_cpu()
        HostDevice().__enter__()
    return torch.device("cpu")


def _active_mode() -> object:
    return torch.overrides._get_current_function_mode()


def _answer_cuda_with_cpu() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.initial_seed = torch.initial_seed
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
