"""Ulysses, alone and inside pass-Q, equals one softmax with an explicit mask: a prefix is captured, read and replayed,
and every gradient agrees in float64, the adjoints in between too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.attention import ulysses
from megatron_branch.attention.backends import AtenCpu
from megatron_branch.attention.branch import branch_attention, leave_state
from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.attention.reference import reference_attention
from megatron_branch.engine import host_cpu
from megatron_branch.engine.groups import Groups, build_groups
from megatron_branch.plan.shard import Shard, shard_unit
from megatron_branch.schedule import runner
from megatron_branch.state.page import Page
from megatron_branch.state.store import StateStore
from tests.harness import run_ranks
from tests.worlds import leave_layout

HEADS, SIZE, LAYER = 8, 16, 3
CASES = [  # tokens of the prefix, segments of the unit that reads it, KV heads
    (1, (1,), 2),
    (24, (7, 1, 5, 5), 1),
    (13, (29, 2), 2),
    (37, (1, 1, 1), 4),
    (5, (8,), 8),
]
SIZES = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)]  # cp, ulysses
FLOAT64_TOLERANCE = 1e-13  # sums of ~100 terms of order one
VISIBLE = 1e-3


@dataclass(eq=False)
class Part:
    """One unit of the case on this rank: where its tokens start, its shards and leaves."""

    start: int
    segments: tuple[int, ...]
    groups: Groups
    size: int

    def shard(self, size: int) -> Shard:
        cp = self.groups.cp
        return shard_unit(self.segments, cp=cp.size, rank=cp.rank, ulysses=size)

    @property
    def kept(self) -> list[int]:
        """Local tokens that are no padding."""
        return [i for i, p in enumerate(self.shard(1).pack_index) if p < sum(self.segments)]

    @property
    def index(self) -> Tensor:
        """Where these stand in the whole sequence."""
        return self.start + torch.from_numpy(self.shard(1).pack_index)[self.kept]

    def local(self, x: Tensor, padding: float) -> Tensor:
        padded = torch.full((self.shard(1).local, *x.shape[1:]), padding, dtype=x.dtype)
        padded[self.kept] = x.detach()[self.index]
        return padded

    def leaves(self, *whole: Tensor) -> list[Tensor]:
        """Padding must not be seen."""
        return [self.local(x, 7.0).requires_grad_() for x in whole]

    def describe(self, **options: Any) -> PassDescriptor:
        groups, shard = self.groups, self.shard(self.size)
        return PassDescriptor(
            positions=torch.arange(shard.local),
            shard=shard,
            context=options.pop("context", ()),
            kernel=AtenCpu(),
            cp_group=groups.pass_q.group if groups.pass_q else None,
            ulysses_group=groups.ulysses.group if groups.ulysses else None,
            **options,
        )


def whole_adjoints(page: Page, part: Part, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Adjoints of the prefix, `[P, G, D]`, added up over all ranks that hold them (collective)."""
    shard, place = part.shard(part.size), part.groups.cp.rank % part.size
    tokens = torch.from_numpy(shard.pack_index)[[i for start, end in shard.valid for i in range(start, end)]]
    first = place * kv_heads // part.size
    heads = torch.arange(first, first + max(kv_heads // part.size, 1))
    sums = []
    with page.own_adjoint(LAYER) as mine:
        for adjoint in mine or (None, None):
            total = torch.zeros(shard.tokens, kv_heads, SIZE, dtype=torch.float64)
            if adjoint is not None:
                total[tokens[:, None], heads] = adjoint
            dist.all_reduce(total)
            sums.append(total)
    return sums[0], sums[1]


def one_case(prefix: int, segments: tuple[int, ...], kv_heads: int, *, groups: Groups, size: int) -> float:
    """Worst absolute difference to the reference on this rank."""
    torch.manual_seed(len(segments) * 100 + prefix)
    own = sum(segments)
    q = torch.randn(prefix + own, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    k = torch.randn(prefix + own, kv_heads, SIZE, dtype=torch.float64, requires_grad=True)
    v = torch.randn(prefix + own, kv_heads, SIZE, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(prefix + own, HEADS, SIZE, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(segments) + 1), torch.tensor((prefix, *segments)))
    seen = (owner[:, None] == owner[None]) | (owner[None] == 0)
    truth = reference_attention(q, k, v, seen & torch.ones_like(seen).tril(), SIZE**-0.5)
    _, *from_tail = torch.autograd.grad(truth[prefix:], (q, k, v), dout[prefix:], retain_graph=True)
    truth.backward(dout)

    first, second = Part(0, (prefix,), groups, size), Part(prefix, segments, groups, size)
    pairs: list[tuple[Tensor, Tensor]] = []
    with StateStore().step() as store:
        page = store.open(0, differentiable=True)
        with torch.no_grad():
            _, key, value = first.leaves(q, k, v)
            leave_state(key, value, first.describe(capture=page), LAYER)

        leaves = second.leaves(q, k, v)
        out = branch_attention(*leaves, second.describe(context=(page,)), LAYER)
        out.backward(second.local(dout, 0.0))
        pairs += [(out[second.kept], truth[second.index])]
        pairs += [(x.grad[second.kept], y.grad[second.index]) for x, y in zip(leaves, (q, k, v), strict=True)]
        adjoints = whole_adjoints(page, first, kv_heads)
        pairs += [(x, y[:prefix]) for x, y in zip(adjoints, from_tail, strict=True)]

        leaves = first.leaves(q, k, v)
        replay = first.describe(roots={})
        out = branch_attention(*leaves, replay, LAYER)
        assert replay.roots is not None
        ends, seeds = runner._state_seeds(page, replay.roots, replay.shard)
        torch.autograd.backward([out, *ends], [first.local(dout, 0.0), *seeds])
        pairs += [(out[first.kept], truth[first.index])]
        pairs += [(x.grad[first.kept], y.grad[first.index]) for x, y in zip(leaves, (q, k, v), strict=True)]
        store.release(0)
    return torch.cat([(a - b).detach().abs().flatten() for a, b in pairs]).max().item()  # NaN if any is


Fault = Callable[[Groups], AbstractContextManager[Any]]


def all_cases(size: int, faults: Sequence[Fault] = ()) -> list[list[float]]:
    """Errors of each case, without a fault and then under each."""
    host_cpu.enter()
    groups = build_groups(dp=1, cp=dist.get_world_size(), tp=1, pp=1, ulysses=size)
    try:
        results = []
        for fault in (lambda groups: nullcontext(groups), *faults):
            with fault(groups) as changed:
                mine = changed if isinstance(changed, Groups) else groups
                results.append([one_case(*case, groups=mine, size=size) for case in CASES])
        return results
    finally:
        leave_layout()


def sizes_of_world(sizes: Sequence[int]) -> list[list[float]]:
    return [all_cases(size)[0] for size in sizes]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ulysses_equals_one_masked_softmax(cp: int) -> None:
    sizes = [size for ranks, size in SIZES if ranks == cp]
    for by_size in run_ranks(cp, sizes_of_world, sizes, timeout_s=120):
        for size, errors in zip(sizes, by_size, strict=True):
            assert all(error < FLOAT64_TOLERANCE for error in errors), (size, dict(zip(CASES, errors, strict=True)))


def blocks_of_ranks_end_to_end(groups: Groups) -> AbstractContextManager[Any]:
    """Tokens stand in the order of ranks: index-causal attention then shows the wrong keys."""
    return patch.multiple(
        ulysses,
        to_pack_order=lambda x: x.flatten(0, 1),
        to_local_order=lambda x, ranks: x.unflatten(0, (ranks, -1)),
    )


def replicas_summed_before_the_exchange(groups: Groups) -> AbstractContextManager[Any]:
    """Each replica enters the backward with the gradient of all of them."""
    original = runner._state_seeds

    def seeds(page: Page, roots: dict[int, tuple[Tensor, Tensor]], shard: Shard) -> Any:
        ends, values = original(page, roots, shard)
        for value in values:
            dist.all_reduce(value, group=groups.ulysses.group)
        return ends, values

    return patch.object(runner, "_state_seeds", seeds)


def one_replica_counts(groups: Groups) -> AbstractContextManager[Any]:
    """The gradient of a KV head is that of its first replica."""
    original = ulysses._shares

    def shares(part: Tensor, ranks: int) -> Tensor:
        whole, heads = original(part, ranks), part.shape[1]
        if heads >= ranks:
            return whole
        first = (torch.arange(ranks) % (ranks // heads) == 0)[:, None, None, None]
        return torch.where(first, whole, whole.detach())

    return patch.object(ulysses, "_shares", shares)


def heads_of_another_rank(groups: Groups) -> AbstractContextManager[Any]:
    """Replicated KV heads are dealt out in turn, not to the ranks whose queries use them."""
    return patch.object(Tensor, "repeat_interleave", lambda x, times, dim: torch.cat([x] * times, dim))


def pass_q_inside(groups: Groups) -> AbstractContextManager[Any]:
    """Heads are exchanged between ranks that do not hold neighbouring blocks."""
    return nullcontext(replace(groups, ulysses=groups.pass_q, pass_q=groups.ulysses))


FAULTS: dict[Fault, tuple[int, int]] = {  # cp, ulysses
    blocks_of_ranks_end_to_end: (4, 4),
    replicas_summed_before_the_exchange: (4, 4),
    one_replica_counts: (4, 4),
    heads_of_another_rank: (4, 4),
    pass_q_inside: (4, 2),
}


@pytest.mark.parametrize("size", [2, 4])
def test_a_fault_is_seen(size: int) -> None:
    faults = [fault for fault, where in FAULTS.items() if where == (4, size)]
    for clean, *found in run_ranks(4, all_cases, size, faults, timeout_s=120):
        assert all(error < FLOAT64_TOLERANCE for error in clean)
        for fault, errors in zip(faults, found, strict=True):
            assert any(not error < VISIBLE for error in errors), fault.__name__
