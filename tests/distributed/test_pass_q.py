"""pass-Q equals one softmax with an explicit mask, forward and every gradient, in float64, whatever the number of
ranks.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_branch.attention.backends import AtenCpu
from megatron_branch.attention.branch import branch_attention
from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.attention.reference import reference_attention
from megatron_branch.plan.shard import shard_unit
from megatron_branch.state.store import StateStore
from tests.harness import run_ranks

HEADS, SIZE, LAYER = 4, 16, 3
CASES = [  # state tokens of each page, segments of the unit, KV heads
    ((), (1,), 2),
    ((), (13,), 1),
    ((24,), (8,), 2),
    ((24, 1, 9), (7, 1, 5, 5), 2),
    ((3,), (29, 2), 4),
    ((1,), (1, 1, 1), 2),
]
FLOAT64_TOLERANCE = 1e-13  # sums of ~100 terms of order one


def one_case(context_sizes: tuple[int, ...], segments: tuple[int, ...], groups: int) -> float:
    """Worst absolute difference to the reference on this rank."""
    rank, cp = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if cp > 1 else None
    torch.manual_seed(len(segments) * 100 + sum(context_sizes))
    past, own = sum(context_sizes), sum(segments)
    q = torch.randn(own, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    k = torch.randn(past + own, groups, SIZE, dtype=torch.float64, requires_grad=True)
    v = torch.randn(past + own, groups, SIZE, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(own, HEADS, SIZE, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    inside = (owner[:, None] == owner[None]) & torch.ones(own, own, dtype=torch.bool).tril()
    mask = torch.cat([torch.ones(own, past, dtype=torch.bool), inside], 1)
    truth = reference_attention(q, k, v, mask, SIZE**-0.5)
    truth.backward(dout)

    worst = 0.0
    order = torch.randperm(past, generator=torch.Generator().manual_seed(5))  # pages are unordered on purpose
    with StateStore().step() as store:
        start = 0
        for unit, size in enumerate(context_sizes):
            mine = order[start : start + size][rank::cp]
            store.open(unit, differentiable=True).write(LAYER, k.detach()[mine].clone(), v.detach()[mine].clone())
            start += size
        shard = shard_unit(segments, cp=cp, rank=rank)
        keep = [i for i, p in enumerate(shard.pack_index) if p < own]
        index = torch.from_numpy(shard.pack_index)[keep]

        def local(x: torch.Tensor) -> torch.Tensor:
            padded = torch.full((shard.local, *x.shape[1:]), 7.0, dtype=x.dtype)  # padding must not be seen
            padded[keep] = x.detach()[index]
            return padded.requires_grad_()

        lq, lk, lv = local(q), local(k[past:]), local(v[past:])
        pages = tuple(store.page(unit) for unit in range(len(context_sizes)))
        unit = PassDescriptor(torch.arange(shard.local), shard, pages, AtenCpu(), cp_group=group)
        out = branch_attention(lq, lk, lv, unit, LAYER)
        seed = torch.zeros_like(out)
        seed[keep] = dout[index]
        out.backward(seed)
        pairs = [(out[keep], truth[index]), (lq.grad[keep], q.grad[index])]
        pairs += [(lk.grad[keep], k.grad[past:][index]), (lv.grad[keep], v.grad[past:][index])]
        start = 0
        for page, size in zip(pages, context_sizes, strict=True):
            mine = order[start : start + size][rank::cp]
            if len(mine):
                with page.own_adjoint(LAYER) as (dk, dv):
                    pairs += [(dk, k.grad[mine]), (dv, v.grad[mine])]
            start += size
        worst = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
        for page in pages:
            store.release(page.unit)
    return worst


def all_cases() -> list[float]:
    return [one_case(*case) for case in CASES]


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_pass_q_equals_one_masked_softmax(cp: int) -> None:
    for errors in run_ranks(cp, all_cases):
        assert all(error < FLOAT64_TOLERANCE for error in errors), dict(zip(CASES, errors, strict=True))


def bf16_gather() -> bool:
    x = torch.full((4, 2), float(dist.get_rank()), dtype=torch.bfloat16)
    from megatron_branch.attention.mirror import gather_pack, scatter_pack

    whole = gather_pack(x, dist.group.WORLD)
    return whole[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0] and scatter_pack(whole, dist.group.WORLD).shape == (4, 2)


def test_pack_order_mirrors_blocks_in_bfloat16() -> None:
    assert run_ranks(2, bf16_gather) == [True, True]
