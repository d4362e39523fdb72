"""Kernels against one softmax differentiated by autograd, part by part."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_branch.attention.backends import ON_GPUS, AtenCpu, select_kernel
from megatron_branch.attention.cuda_kernels import AtenCuda
from megatron_branch.attention.kernel import Kernel, Saved
from megatron_branch.attention.reference import reference_attention

HEADS, GROUPS, SIZE = 4, 2, 16
SCALE = 0.3  # not the usual 1 / sqrt(D), so that a kernel which ignores it fails


def inputs(queries: int, keys: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    torch.manual_seed(queries * 31 + keys)
    q = torch.randn(queries, HEADS, SIZE, dtype=dtype, device=device)
    k, v = (torch.randn(keys, GROUPS, SIZE, dtype=dtype, device=device) for _ in range(2))
    return q, k, v


def compare(
    kernel: Kernel, *, device: str, dtype: torch.dtype, tolerance: float, size: tuple[int, int, bool, int]
) -> None:
    queries, keys, causal, count = size
    q, k, v = (x.requires_grad_() for x in inputs(queries * count, keys * count, dtype, device))
    piece_q, piece_k = torch.arange(queries * count) // queries, torch.arange(keys * count) // keys
    mask = piece_q[:, None] == piece_k[None]
    if causal:
        mask &= torch.arange(queries * count)[:, None] % queries >= torch.arange(keys * count)[None] % keys
    truth = reference_attention(q, k, v, mask.to(device), SCALE)
    dout = torch.randn_like(truth)
    truth.backward(dout)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, causal=causal, scale=SCALE, count=count)
        grads = kernel.backward(dout, Saved(q, k, v, out, lse), causal=causal, scale=SCALE, count=count)
    scores = torch.einsum("thd,shd->ths", q, k.repeat_interleave(HEADS // GROUPS, 1)) * SCALE
    torch.testing.assert_close(out, truth.detach(), rtol=0, atol=tolerance)
    expected_lse = scores.masked_fill(~mask.to(device)[:, None], float("-inf")).logsumexp(-1).detach()
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype), rtol=0, atol=tolerance)
    for mine, theirs in zip(grads, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


SIZES = {
    "causal": (9, 9, True, 1),
    "full": (5, 13, False, 1),
    "one": (1, 1, True, 1),
    "batch of causal": (4, 4, True, 3),
    "batch of full": (3, 7, False, 2),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_aten_cpu_in_float64(size: tuple[int, int, bool, int]) -> None:
    compare(AtenCpu(), device="cpu", dtype=torch.float64, tolerance=1e-13, size=size)


# bfloat16 keeps 8 bits: of outputs and gradients of size 1 to 4 some 2e-2 are lost, in the probabilities once more.
BFLOAT16 = 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aten", "cudnn", "flash2", "flash3"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_gpu_kernels_in_bfloat16(backend: str, size: tuple[int, int, bool, int]) -> None:
    try:
        kernel = select_kernel(backend, device=torch.device("cuda"), dtype=torch.bfloat16)
    except ValueError as missing:
        pytest.skip(str(missing))
    compare(kernel, device="cuda", dtype=torch.bfloat16, tolerance=BFLOAT16, size=size)


class FakeLibrary:
    """What the GPU libraries compute, on the CPU: `[b, n, heads, D]` tensors, log-sum-exp `[b, heads, n]`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = aten(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def backward(self, tensors: list[Tensor], lse: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        """`tensors`: dout, q, k, v, out."""
        assert lse.is_contiguous() and lse.shape == (tensors[1].shape[0], HEADS, tensors[1].shape[1])
        aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = aten(*(x.transpose(1, 2) for x in tensors), lse, 0.0, causal, scale=scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def fake_aten(library: FakeLibrary) -> dict[str, Any]:
    """PyTorch's two GPU kernels with their signatures."""

    def flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert (max_q, max_k, dropout) == (q.shape[1], k.shape[1], 0.0)
        return (*library.forward(q, k, v, causal, scale), None, None, None)

    def flash_backward(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale
    ):
        assert (max_q, max_k, dropout) == (q.shape[1], k.shape[1], 0.0)
        return library.backward([dout, q, k, v, out], lse, causal, scale)

    def cudnn(q, k, v, bias, compute_lse, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert compute_lse and dropout == 0.0
        out, lse = library.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return (out.transpose(1, 2), lse[..., None], *[None] * 7)

    def cudnn_backward(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        assert (max_q, max_k, dropout) == (q.shape[2], k.shape[2], 0.0)
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        return tuple(x.transpose(1, 2) for x in library.backward(tensors, lse.squeeze(-1), causal, scale))

    return {
        "_flash_attention_forward": flash,
        "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_cudnn_attention": cudnn,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        ),
    }


def fake_flash2(library: FakeLibrary) -> SimpleNamespace:
    """flash-attn 2.7 to 2.8."""

    def forward(  # type: ignore[no-untyped-def]
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert not alibi_slopes and not return_softmax
        return (*library.forward(q, k, v, causal, softmax_scale), None, None)

    def backward(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        grads = library.backward([dout, q, k, v, out], softmax_lse, causal, softmax_scale)
        for mine, grad in zip((dq, dk, dv), grads, strict=True):
            mine.copy_(grad)

    # They are registered as operators, which do not show their arguments.
    def operator(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **kwargs)

    return SimpleNamespace(_flash_attn_forward=operator(forward), _flash_attn_backward=operator(backward))


def fake_flash3(library: FakeLibrary) -> SimpleNamespace:
    """FlashAttention-3 of 2025: some of the many arguments without a default."""

    def forward(  # type: ignore[no-untyped-def]
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, softmax_scale, causal, window_size=(-1, -1)
    ):
        assert (k_new, v_new, qv, out, cu_seqlens_q) == (None,) * 5
        return library.forward(q, k, v, causal, softmax_scale)

    def backward(  # type: ignore[no-untyped-def]
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        sequed_q,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        softcap=0.0,
        deterministic=False,
    ):
        assert (cu_seqlens_q, sequed_q) == (None, None)
        grads = library.backward([dout, q, k, v, out], softmax_lse, causal, softmax_scale)
        for mine, grad in zip((dq, dk, dv), grads, strict=True):
            mine.copy_(grad)

    return SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)


@pytest.mark.parametrize("backend", ["aten", "cudnn", "flash2", "flash3"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_gpu_kernels_hand_shapes_and_arguments_on(
    monkeypatch: pytest.MonkeyPatch, backend: str, size: tuple[int, int, bool, int]
) -> None:
    """Around libraries that compute on the CPU: layouts, log-sum-exp and arguments are right; the libraries are not
    tested.
    """
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", fake_flash2(library))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash3(library))
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(**fake_aten(library)))
    compare(ON_GPUS[backend](), device="cpu", dtype=torch.float64, tolerance=1e-13, size=size)


def test_the_parts_of_a_split_softmax_need_the_whole_output_and_lse() -> None:
    q, k, v = inputs(6, 10, torch.float64)
    dout = torch.randn_like(q)
    kernel = AtenCpu()
    out, lse = kernel.forward(q, k, v, causal=False, scale=SCALE)
    whole = kernel.backward(dout, Saved(q, k, v, out, lse), causal=False, scale=SCALE)
    parts = [
        kernel.backward(dout, Saved(q, k[part], v[part], out, lse), causal=False, scale=SCALE)
        for part in (slice(0, 3), slice(3, 10))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=0, atol=1e-13)
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([p[index] for p in parts]), whole[index], rtol=0, atol=1e-13)


def test_strided_inputs_are_as_good_as_contiguous_ones() -> None:
    q, k, v = inputs(7, 7, torch.float64)
    wide = torch.zeros(7, GROUPS, 3 * SIZE, dtype=torch.float64)
    wide[..., SIZE : 2 * SIZE] = v
    mine, _ = AtenCpu().forward(q, k, wide[..., SIZE : 2 * SIZE], causal=True, scale=SCALE)
    truth, _ = AtenCpu().forward(q, k, v, causal=True, scale=SCALE)
    assert torch.equal(mine, truth)


def test_selection_names_what_does_not_fit() -> None:
    assert isinstance(select_kernel("auto", device=torch.device("cpu"), dtype=torch.float64), AtenCpu)
    assert isinstance(select_kernel("auto", device=torch.device("cuda"), dtype=torch.bfloat16), AtenCuda)
    with pytest.raises(ValueError, match=r"attention\.backend='flash' is unknown; choose auto, aten, cudnn"):
        select_kernel("flash", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a GPU"):
        select_kernel("cudnn", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        select_kernel("aten", device=torch.device("cuda"), dtype=torch.float32)


@pytest.mark.parametrize("backend", ["flash2", "flash3"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    for module in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"attention\.backend='{backend}' needs .*install it"):
        select_kernel(backend, device=torch.device("cuda"), dtype=torch.bfloat16)
