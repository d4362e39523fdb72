"""Merging partial softmax results by their log-sum-exp.

Shapes: T queries, H query heads, D head size. `lse_TH` is -inf where a query saw no key; its output there is 0.
The identity is that of FlashAttention (Dao et al., 2022, section 3.1) and Ring Attention (Liu et al., 2023).

The weights of the parts are computed from differences of log-sum-exps so that they add up to 1 within one rounding.
`exp(lse - total)` would not do: its error grows with |lse|, and an output that is off by a common factor leaves softmax
gradients that no longer cancel over the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_into(out_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, part_lse_TH: Tensor) -> None:
    """Merge a part over other keys into `out_THD`, `lse_TH` in place; every query saw a key in one of the two."""
    share_TH = torch.sigmoid(part_lse_TH - lse_TH)
    out_THD.lerp_(part_THD.to(out_THD.dtype), share_TH[..., None])
    torch.logaddexp(lse_TH, part_lse_TH, out=lse_TH)


def rescale_(out_THD: Tensor, every_RTH: Tensor, rank: int) -> None:
    """Weight the partial result of `rank` by its share of the whole softmax; those of all R ranks can then be summed.

    Args:
        out_THD: in place.
        every_RTH: log-sum-exp of each rank's part.
        rank: whose part `out_THD` is.
    """
    out_THD.mul_(torch.softmax(every_RTH, 0)[rank][..., None])
