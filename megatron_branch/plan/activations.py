"""Bytes that the autograd graph of one pass holds on one rank: what Megatron's layers, built as here, save.

Counted are the tensors that a backward needs: inputs of linear layers and norms, the normalised values (norms compute
in float32, float64 for a float64 model), queries, keys and values, the output of the core attention and its
log-sum-exp, which covers the whole pass and is held by every context-parallel rank.

Always true:
- the bytes are linear in the pass's local tokens (padding included);
- parameters and the pages of earlier units are not counted: they exist without the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_branch.plan.cost import ModelShape

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Bytes per local token on one rank.

    Attributes:
        layer: one transformer layer.
        stage_input: hidden states entering a layer; what is left of a layer whose activations are recomputed.
        first: token ids, kept on the first stage.
        final_norm: the norm before the head, on the last stage.
        row: per position at which the head runs: hidden states, target and scores (the loss's own few bytes left out).
    """

    layer: int
    stage_input: int
    first: int
    final_norm: int
    row: int

    def pass_bytes(self, tokens: int, *, layers: int, first: bool, rows: int | None = None) -> int:
        """The whole graph of one pass.

        Args:
            tokens: local tokens, padding included.
            layers: of this stage.
            first: this is the first stage.
            rows: local positions at which the head runs; None where it does not (other stages, units without loss).
        """
        per_token = layers * self.layer + (self.first if first else 0)
        if rows is None:
            return tokens * per_token
        return tokens * (per_token + self.final_norm) + rows * self.row


def activation_sizes(shape: ModelShape, *, qk_norm: bool, dtype_bytes: int, tp: int, cp: int) -> ActivationSizes:
    """Sizes of a model split over `tp` and `cp` ranks.

    Args:
        shape: of the whole model.
        qk_norm: queries and keys are normalised per head.
        dtype_bytes: of weights and activations: 2, 4 or 8.
        tp, cp: number of tensor and context-parallel ranks.
    """
    size, precise = dtype_bytes, 8 if dtype_bytes == 8 else 4
    heads, kv_heads = shape.heads // tp, shape.kv_heads // tp
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    # The input in the norm's precision, the root mean square, the normalised value; then the linear layer's input.
    statistics = precise * (2 * shape.hidden + 1)
    norm = statistics + size * shape.hidden
    projected = size * (q + 2 * kv)
    head_norms = 0
    if qk_norm:
        # In the norm's own precision keys, and queries of a single group, are views of the projection.
        inputs = q + kv if size != precise else q if kv_heads > 1 else 0
        head_norms = precise * (inputs + q + kv + heads + kv_heads)
    rotary = 4 * size * shape.head_dim + size * (q + kv)
    attention = size * q + precise * heads * cp
    mlp = 5 * size * shape.ffn // tp
    return ActivationSizes(
        layer=2 * norm + projected + head_norms + rotary + attention + mlp,
        stage_input=size * shape.hidden,
        first=ID_BYTES,
        final_norm=statistics,
        row=size * shape.hidden + 2 * ID_BYTES + 2 * precise,
    )
