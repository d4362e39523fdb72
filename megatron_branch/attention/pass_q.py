"""Attention over the ancestors' state and a unit's own tokens, with the state sharded over ranks and the queries
passed.

Forward: gather the pack's queries, attend to the local share of the state and of the own tokens, merge the parts by
their log-sum-exp, sum over ranks with a reduce-scatter. Traffic is proportional to the unit, not to the prefix.
Backward: gather output gradients and outputs, run each part's backward with the global log-sum-exp, add the state's
share into the pages' adjoints in place, reduce-scatter the query gradients. Keys, values and their gradients never
move.

pass-Q is the layout of Yang et al., "Context Parallelism for Scalable Million-Token Inference" (2024).

Shapes: t local tokens (padding included), S tokens of the padded pack, T its real tokens, H query heads, G KV heads,
D head size, P tokens of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.attention.kernel import Saved
from megatron_branch.attention.merge import merge_into, rescale_
from megatron_branch.attention.mirror import all_gather_single, gather_pack, scatter_pack
from megatron_branch.state.page import Page, adjoint_dtype


class _Call(NamedTuple):
    """One kernel call: pack rows of the queries, keys and values, and where the key gradient goes."""

    q: slice
    k_PGD: Tensor
    v_PGD: Tensor
    causal: bool
    count: int
    page: Page | None
    local: slice


def _calls(unit: PassDescriptor, layer: int, k_tGD: Tensor, v_tGD: Tensor, *, backward: bool) -> Iterator[_Call]:
    """State first, so that the first call covers every query if there is any state here, and the state may go before
    the own tokens' calls."""
    whole = slice(0, unit.shard.tokens)
    with unit.read_state(layer, backward=backward) as pages:
        for page, keys, values in pages:
            if keys.shape[0]:
                yield _Call(whole, keys, values, False, 1, page, slice(0, 0))
    pages = ()
    for work in unit.shard.work:
        start = unit.shard.local_index(work.k_start)
        local = slice(start, start + work.k_end - work.k_start)
        yield _Call(slice(work.q_start, work.q_end), k_tGD[local], v_tGD[local], work.causal, work.count, None, local)


def _forward(q_SHD: Tensor, calls: Iterator[_Call], unit: PassDescriptor, scale: float) -> tuple[Tensor, Tensor]:
    """Output `[S, H, D]` over this rank's keys in the accumulation dtype and log-sum-exp `[S, H]`."""
    tokens, padded = unit.shard.tokens, unit.shard.padded
    dtype = adjoint_dtype(q_SHD.dtype)
    out = lse = None
    for call in calls:
        part, part_lse = unit.kernel.forward(
            q_SHD[call.q], call.k_PGD, call.v_PGD, causal=call.causal, scale=scale, count=call.count
        )
        if out is None or lse is None:
            if part.shape[0] == padded:
                out, lse = part.to(dtype), part_lse
                continue
            out = torch.zeros_like(q_SHD, dtype=dtype)
            lse = torch.full(q_SHD.shape[:2], float("-inf"), dtype=dtype, device=q_SHD.device)
        merge_into(out[call.q], lse[call.q], part, part_lse)
    if out is None or lse is None:
        out = torch.zeros_like(q_SHD, dtype=dtype)
        lse = torch.full(q_SHD.shape[:2], float("-inf"), dtype=dtype, device=q_SHD.device)
    lse[tokens:] = 0.0
    return out, lse


def _merge_ranks(out_SHD: Tensor, lse_SH: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Local output `[t, H, D]` over all ranks' keys, and the global log-sum-exp `[S, H]`."""
    every = lse_SH.new_empty((dist.get_world_size(group), *lse_SH.shape))
    all_gather_single(every.view(-1, lse_SH.shape[1]), lse_SH.contiguous(), group=group)
    rescale_(out_SHD, every, dist.get_rank(group))
    return scatter_pack(out_SHD, group), torch.logsumexp(every, 0)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, unit: PassDescriptor, layer: int, scale: float
    ) -> Tensor:
        q_SHD = q_tHD if unit.cp_group is None else gather_pack(q_tHD, unit.cp_group)
        out, lse = _forward(q_SHD, _calls(unit, layer, k_tGD, v_tGD, backward=False), unit, scale)
        if unit.cp_group is not None:
            out, lse = _merge_ranks(out, lse, unit.cp_group)
        out = out.to(q_tHD.dtype)
        ctx.save_for_backward(q_tHD, k_tGD, v_tGD, out, lse)
        ctx.unit, ctx.layer, ctx.scale = unit, layer, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout_tHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k_tGD, v_tGD, out, lse_SH = ctx.saved_tensors
        unit: PassDescriptor = ctx.unit
        dout = dout_tHD.contiguous()
        if unit.cp_group is not None:
            q, dout, out = gather_pack(torch.stack([q, dout, out], 1), unit.cp_group).unbind(1)
            q, dout, out = q.contiguous(), dout.contiguous(), out.contiguous()
        dtype = adjoint_dtype(q.dtype)
        dq: Tensor | None = None
        dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (k_tGD, v_tGD))
        for call in _calls(unit, ctx.layer, k_tGD, v_tGD, backward=True):
            saved = Saved(q[call.q], call.k_PGD, call.v_PGD, out[call.q], lse_SH[call.q])
            part, dk_part, dv_part = unit.kernel.backward(
                dout[call.q], saved, causal=call.causal, scale=ctx.scale, count=call.count
            )
            if dq is None and part.shape[0] == unit.shard.padded:
                dq = part.to(dtype)
            else:
                dq = torch.zeros_like(q, dtype=dtype) if dq is None else dq
                dq[call.q] += part
            if call.page is None:
                dk[call.local] += dk_part
                dv[call.local] += dv_part
            elif call.page.differentiable:
                call.page.add_adjoint(ctx.layer, dk_part, dv_part)
        if dq is None:
            dq = torch.zeros_like(q, dtype=dtype)
        if unit.cp_group is not None:
            dq = scatter_pack(dq, unit.cp_group)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def pass_q_attention(
    q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, unit: PassDescriptor, layer: int, *, scale: float | None = None
) -> Tensor:
    """Attention over the context and the unit itself of the tokens and heads that are here; see `branch_attention`."""
    scale = q_tHD.shape[-1] ** -0.5 if scale is None else scale
    return _BranchAttention.apply(q_tHD, k_tGD, v_tGD, unit, layer, scale)
