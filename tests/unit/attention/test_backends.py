"""Kernels against one softmax differentiated by autograd, part by part."""

import pytest
import torch

from megatron_branch.attention.backends import AtenCpu, AtenCuda, Kernel, Saved, select_kernel
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


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_aten_cuda_in_bfloat16(size: tuple[int, int, bool, int]) -> None:
    compare(AtenCuda(), device="cuda", dtype=torch.bfloat16, tolerance=5e-2, size=size)


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
    with pytest.raises(ValueError, match=r"attention\.backend='flash' is unknown"):
        select_kernel("flash", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        select_kernel("aten", device=torch.device("cuda"), dtype=torch.float32)
