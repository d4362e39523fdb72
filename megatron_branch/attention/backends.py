"""Attention kernels behind one interface.

A kernel computes softmax attention of some queries over some keys and its log-sum-exp. Its backward, handed the
*global* output and log-sum-exp of the queries, gives this part's share of the gradients, because softmax probabilities
are exp(score - lse) whatever the other keys are.

Shapes: T queries, P keys, H query heads, G KV heads (H a multiple of G), D head size; all token-major.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Saved(NamedTuple):
    """What a backward needs; output and log-sum-exp are those over *all* keys."""

    q_THD: Tensor
    k_PGD: Tensor
    v_PGD: Tensor
    out_THD: Tensor
    lse_TH: Tensor


class Kernel(Protocol):
    """`count` equal pieces laid end to end are independent; a `causal` piece has as many queries as keys; T, P > 0."""

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Output `[T, H, D]` in the inputs' dtype and log-sum-exp `[T, H]` in float32 (float64 for float64)."""
        ...

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's `dq_THD, dk_PGD, dv_PGD` in the inputs' dtype."""
        ...


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


class AtenCuda:
    """`aten::_flash_attention_forward` (FlashAttention-2 inside PyTorch): float16 and bfloat16, grouped queries
    natively.
    """

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.view(count, -1, *x.shape[1:]) for x in (q_THD, k_PGD, v_PGD))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out.flatten(0, 1), _tokens_first(lse)

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = (x.view(count, -1, *x.shape[1:]).contiguous() for x in saved[:4])
        lse = _heads_first(saved[4], count).contiguous()
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            dout_THD.contiguous().view(q.shape), q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (grad.flatten(0, 1) for grad in grads)
        return dq, dk, dv


def select_kernel(backend: str, *, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for a device and dtype.

    Args:
        backend: `auto` or `aten`.
        device: where the model lives.
        dtype: the model's dtype.

    Raises:
        ValueError: no kernel of that name runs there.
    """
    if backend not in ("auto", "aten"):
        raise ValueError(f"attention.backend={backend!r} is unknown; choose auto or aten")
    if device.type == "cpu":
        return AtenCpu()
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention.backend={backend!r} on {device.type} takes bfloat16 or float16, model.dtype is {dtype}; "
            "set model.dtype=bfloat16"
        )
    return AtenCuda()
