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
    whole, total = kernel.forward(q, k, v, causal=False, scale=1.0)
    summed = torch.zeros_like(whole)
    for part in (slice(0, 4), slice(4, 9)):
        out, lse = kernel.forward(q, k[part], v[part], causal=False, scale=1.0)
        rescale_(out, lse, total)
        summed += out
    torch.testing.assert_close(summed, whole, rtol=0, atol=1e-14)
