"""The slow twin: one softmax with an explicit mask, differentiated by autograd. For tests; nothing else calls it."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, mask_TS: Tensor, scale: float) -> Tensor:
    """Attention of T queries over S keys; `mask_TS` is True where a query sees a key. Returns `[T, H, D]`."""
    repeat = q_THD.shape[1] // k_SGD.shape[1]
    k_SHD, v_SHD = k_SGD.repeat_interleave(repeat, 1), v_SGD.repeat_interleave(repeat, 1)
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * scale
    weights_HTS = scores_HTS.masked_fill(~mask_TS, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
