"""Attention kernels by name, and the one of CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_branch.attention.cuda_kernels import AtenCuda, CudnnCuda, FlashAttention2, FlashAttention3
from megatron_branch.attention.kernel import Kernel, Saved


def _heads_first(x: Tensor, count: int) -> Tensor:
    """[count * n, heads, D] -> [count, heads, n, D], a view."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """[count, heads, n, ...] -> [count * n, heads, ...], a view where the memory is token-major."""
    return x.transpose(1, 2).flatten(0, 1)


class AtenCpu:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: float64, float32, bfloat16 and float16, grouped queries
    natively.

    An empty key tensor ends the process inside the kernel, so callers must not pass one.
    """

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        assert k_PGD.shape[0] > 0 and q_THD.shape[0] > 0
        q, k, v = (_heads_first(x, count) for x in (q_THD, k_PGD, v_PGD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return _tokens_first(out), _tokens_first(lse)

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = (_heads_first(x, count) for x in saved)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(dout_THD, count), q, k, v, out, lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = (_tokens_first(grad) for grad in grads)
        return dq, dk, dv


ON_GPUS: dict[str, type[Kernel]] = {
    "auto": AtenCuda,
    "aten": AtenCuda,
    "cudnn": CudnnCuda,
    "flash2": FlashAttention2,
    "flash3": FlashAttention3,
}


def select_kernel(backend: str, *, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for a device and dtype.

    Args:
        backend: `auto`, `aten`, `cudnn`, `flash2` or `flash3`.
        device: where the model lives.
        dtype: the model's dtype.

    Raises:
        ValueError: no kernel of that name runs there.
    """
    if backend not in ON_GPUS:
        raise ValueError(f"attention.backend={backend!r} is unknown; choose {', '.join(ON_GPUS)}")
    if device.type == "cpu":
        if backend not in ("auto", "aten"):
            raise ValueError(f"attention.backend={backend!r} needs a GPU, the model is on the CPU; set it to auto")
        return AtenCpu()
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention.backend={backend!r} on {device.type} takes bfloat16 or float16, model.dtype is {dtype}; "
            "set model.dtype=bfloat16"
        )
    return ON_GPUS[backend]()
