"""Merging two parts gives the softmax over both; a query without keys in one part keeps the other's result."""

import torch

from megatron_branch.attention.backends import AtenCpu
from megatron_branch.attention.merge import merge_into, rescale_


def parts() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 8).double(), torch.randn(9, 1, 8).double(), torch.randn(9, 1, 8).double()
    return q, k, v


def test_two_parts_are_the_whole() -> None:
    q, k, v = parts()
    kernel = AtenCpu()
    whole, whole_lse = kernel.forward(q, k, v, causal=False, scale=1.0)
    out, lse = kernel.forward(q, k[:2], v[:2], causal=False, scale=1.0)
    merge_into(out, lse, *kernel.forward(q, k[2:], v[2:], causal=False, scale=1.0))
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-14)


def test_nothing_merged_with_a_part_is_the_part() -> None:
    q, k, v = parts()
    part, part_lse = AtenCpu().forward(q, k, v, causal=False, scale=1.0)
    out, lse = torch.zeros_like(part), torch.full_like(part_lse, float("-inf"))
    merge_into(out, lse, part, part_lse)
    assert torch.equal(out, part) and torch.equal(lse, part_lse)


def test_rescaled_parts_sum_to_the_whole() -> None:
    q, k, v = parts()
    kernel = AtenCpu()
    whole, _ = kernel.forward(q, k, v, causal=False, scale=1.0)
    outs, lses = zip(
        *(kernel.forward(q, k[p], v[p], causal=False, scale=1.0) for p in (slice(4), slice(4, 9))), strict=True
    )
    for rank, out in enumerate(outs):
        rescale_(out, torch.stack(lses), rank)
    torch.testing.assert_close(outs[0] + outs[1], whole, rtol=0, atol=1e-14)


def test_weights_add_up_to_one_whatever_the_scores() -> None:
    """Values of 1 stay 1 within a rounding though the log-sum-exps are large, where float32 resolves them to 1e-5."""
    lse = torch.linspace(100.0, 101.0, 303).view(3, 1, 101).permute(0, 2, 1)
    out, merged = torch.ones(101, 1, 4), lse[0].clone()
    merge_into(out, merged, torch.ones(101, 1, 4), lse[1])
    parts = [torch.ones(101, 1, 4) for _ in range(3)]
    for rank, part in enumerate(parts):
        rescale_(part, lse, rank)
    for result in (out, sum(parts)):
        torch.testing.assert_close(result, torch.ones(101, 1, 4), rtol=0, atol=4 * torch.finfo(torch.float32).eps)
