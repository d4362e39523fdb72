"""Attention kernels of GPUs: FlashAttention inside PyTorch, cuDNN, and the flash-attn packages where installed.

All take float16 and bfloat16, and grouped queries natively; each is called below its autograd, so that the backward can
be handed the output and log-sum-exp over all keys.

Shapes as in `kernel`; inside, a batch of `count` pieces `[count, n, heads, D]` or, for cuDNN, `[count, heads, n, D]`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_branch.attention.kernel import Saved


def _batched(x: Tensor, count: int) -> Tensor:
    """[count * n, ...] -> [count, n, ...], a view."""
    return x.view(count, -1, *x.shape[1:])


def _lse_to_tokens(lse: Tensor) -> Tensor:
    """[count, H, n] -> [count * n, H]."""
    return lse.transpose(1, 2).flatten(0, 1)


def _lse_to_heads(lse_TH: Tensor, count: int) -> Tensor:
    """[count * n, H] -> [count, H, n], contiguous: kernels do not read its strides."""
    return _batched(lse_TH, count).transpose(1, 2).contiguous()


class AtenCuda:
    """`aten::_flash_attention_forward`: FlashAttention-2 (Dao, 2023) as PyTorch ships it."""

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_batched(x, count) for x in (q_THD, k_PGD, v_PGD))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out.flatten(0, 1), _lse_to_tokens(lse)

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = (_batched(x, count).contiguous() for x in saved[:4])
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            dout_THD.contiguous().view(q.shape), q, k, v, out, _lse_to_heads(saved.lse_TH, count), None, None,
            q.shape[1], k.shape[1], 0.0, causal, unused, unused, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (grad.flatten(0, 1) for grad in grads)
        return dq, dk, dv


class CudnnCuda:
    """`aten::_scaled_dot_product_cudnn_attention`: cuDNN's fused attention, the faster one on Hopper."""

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_batched(x, count).transpose(1, 2) for x in (q_THD, k_PGD, v_PGD))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2).flatten(0, 1), _lse_to_tokens(lse.squeeze(-1))

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, dout = (_batched(x, count).transpose(1, 2) for x in (*saved[:4], dout_THD))
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, _lse_to_heads(saved.lse_TH, count)[..., None], unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2).flatten(0, 1) for grad in grads)
        return dq, dk, dv


class _FlashPackage:
    """What the two packages share: `[count, n, heads, D]` tensors, and gradients written into given ones."""

    _plain: ClassVar[dict[str, Any]] = {}  # arguments that turn off what is not used here
    _plain_forward: ClassVar[dict[str, Any]] = {}

    def __init__(self, module: str, *, backend: str, package: str) -> None:
        self._package = _import(module, backend=backend, package=package)

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_batched(x, count) for x in (q_THD, k_PGD, v_PGD))
        out, lse, *_ = _with_absent(
            self._package._flash_attn_forward,
            q=q, k=k, v=v, softmax_scale=scale, causal=causal, **self._plain, **self._plain_forward,
        )  # fmt: skip
        return out.flatten(0, 1), _lse_to_tokens(lse)

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, dout = (_batched(x, count) for x in (*saved[:4], dout_THD))
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _with_absent(
            self._package._flash_attn_backward,
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=_lse_to_heads(saved.lse_TH, count), dq=dq, dk=dk, dv=dv,
            softmax_scale=scale, causal=causal, deterministic=False, **self._plain,
        )  # fmt: skip
        return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)


class FlashAttention2(_FlashPackage):
    """The package `flash-attn`, 2.7 or later."""

    _plain: ClassVar[dict[str, Any]] = {
        "dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip
    _plain_forward: ClassVar[dict[str, Any]] = {"return_softmax": False}

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface", backend="flash2", package="flash-attn>=2.7")


class FlashAttention3(_FlashPackage):
    """FlashAttention-3 (Shah et al., 2024), built from the `hopper` folder of its repository; Hopper GPUs."""

    def __init__(self) -> None:
        super().__init__("flash_attn_interface", backend="flash3", package="FlashAttention-3 (hopper/)")


def _with_absent(function: Callable[..., Any], **given: Any) -> Any:
    """Call with None for everything else without a default: ALiBi, lengths, pages, rotary tables, scales of float8."""
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return function(**dict.fromkeys(required) | given)


def _import(name: str, *, backend: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"attention.backend={backend!r} needs {package}, whose module {name} cannot be imported ({error}); "
            "install it, or set attention.backend=aten"
        ) from None
