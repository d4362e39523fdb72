"""Merging partial softmax results by their log-sum-exp.

Shapes: T queries, H query heads, D head size. `lse_TH` is -inf where a query saw no key; its output there is 0.
The identity is that of FlashAttention (Dao et al., 2022, section 3.1) and Ring Attention (Liu et al., 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_into(out_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, part_lse_TH: Tensor) -> None:
    """Merge a part over other keys into `out_THD`, `lse_TH` in place; every query saw a key in one of the two."""
    total = torch.logaddexp(lse_TH, part_lse_TH)
    out_THD.mul_(torch.exp(lse_TH - total)[..., None])
    out_THD.addcmul_(part_THD.to(out_THD.dtype), torch.exp(part_lse_TH - total)[..., None])
    lse_TH.copy_(total)


def rescale_(out_THD: Tensor, lse_TH: Tensor, total_TH: Tensor) -> None:
    """Weight a partial result by its share of the whole softmax, so that the parts of several ranks can be summed."""
    out_THD.mul_(torch.exp(lse_TH - total_TH)[..., None])
