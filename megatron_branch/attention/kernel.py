"""The interface of attention kernels.

A kernel computes softmax attention of some queries over some keys and its log-sum-exp. Its backward, handed the
*global* output and log-sum-exp of the queries, gives this part's share of the gradients, because softmax probabilities
are exp(score - lse) whatever the other keys are.

Shapes: T queries, P keys, H query heads, G KV heads (H a multiple of G), D head size; all token-major.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Saved(NamedTuple):
    """What a backward needs; output and log-sum-exp are those over *all* keys."""

    q_THD: Tensor
    k_PGD: Tensor
    v_PGD: Tensor
    out_THD: Tensor
    lse_TH: Tensor


class Kernel(Protocol):
    """`count` equal pieces laid end to end are independent; a `causal` piece has as many queries as keys; T, P > 0."""

    def forward(
        self, q_THD: Tensor, k_PGD: Tensor, v_PGD: Tensor, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Output `[T, H, D]` in the inputs' dtype and log-sum-exp `[T, H]` in float32 (float64 for float64)."""
        ...

    def backward(
        self, dout_THD: Tensor, saved: Saved, *, causal: bool, scale: float, count: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's `dq_THD, dk_PGD, dv_PGD` in the inputs' dtype."""
        ...
