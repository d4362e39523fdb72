"""Log-probs and entropies of given tokens from hidden states, in bounded memory, with the vocabulary split over ranks.

The output layer and the softmax are one operation here, so that no `[tokens, vocabulary]` tensor exists: the logits of
a few rows are computed, reduced to three numbers per row, dropped, and computed again in the backward pass (the method
of Liger's and Megatron's fused linear cross entropies).

Shapes: T rows (positions that predict a trained token), C rows of one chunk, E hidden size, V rows of the output weight
on this rank. With tp ranks, rank r holds the rows `[r * V, (r + 1) * V)` of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# The logit of a padded vocabulary row: exp() of it is 0 beside any real logit, and unlike -inf it stays finite when it
# is multiplied by 0 or by the size of the vocabulary.
_NEVER = -1e30


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How logits become log-probs.

    Attributes:
        temperature: > 0; logits are divided by it, for log-probs and entropies alike.
        vocab: number of real tokens; weight rows from there on are padding and never enter the softmax.
        chunk_tokens: rows whose logits exist at the same time, >= 1; None for all at once.
        entropy: also compute the entropy of each row's distribution.
    """

    temperature: float
    vocab: int
    chunk_tokens: int | None
    entropy: bool


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per row, in nats: the log-prob of its target `[T]`, and the entropy of its distribution `[T]` or None.

    float32, or float64 for a float64 model.
    """

    logp_T: Tensor
    entropy_T: Tensor | None


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of the vocabulary on this rank: tokens `[start, start + real)`, then padding up to `width` rows."""

    start: int
    real: int
    width: int

    @staticmethod
    def of(weight_VE: Tensor, vocab: int, group: dist.ProcessGroup | None) -> _Shard:
        width = weight_VE.shape[0]
        rank = dist.get_rank(group) if group is not None else 0
        return _Shard(start=rank * width, real=min(max(vocab - rank * width, 0), width), width=width)

    def locate(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each target, and whether the target is on this rank (the column is arbitrary where not)."""
        column_C = targets_C - self.start
        here_C = (column_C >= 0) & (column_C < self.width)
        return column_C.clamp(0, self.width - 1), here_C


def token_scores(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    targets_T: Tensor,
    *,
    settings: HeadSettings,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """Log-prob (and entropy) of one target token per row, differentiable in the hidden states and the output weight.

    Args:
        hidden_TE: hidden states after the final norm `[T, E]`, the same on all ranks of `tp_group`. T may be 0.
        weight_VE: this rank's rows of the padded output weight `[V, E]`. The parameter itself, not a view or a copy:
            a host that partitions parameters moves its storage between forward and backward.
        targets_T: int64 token ids `[T]`, each in `[0, settings.vocab)`.
        settings: temperature, vocabulary, chunking.
        tp_group: the ranks that share the vocabulary; None for one rank. Its ranks make the same calls.

    Returns:
        The scores, the same on all ranks of `tp_group`. The gradient of `hidden_TE` is complete on every rank (summed
        over the group); that of `weight_VE` is the one of this rank's rows, summed over chunks in float32 (float64 for
        a float64 model).
    """
    logp_T, entropy_T = _TokenScores.apply(hidden_TE, weight_VE, targets_T, settings, tp_group)
    return TokenScores(logp_T, entropy_T)


def _chunks(rows: int, chunk_tokens: int | None) -> Iterator[slice]:
    step = chunk_tokens if chunk_tokens is not None else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _logits(hidden_CE: Tensor, weight_VE: Tensor, shard: _Shard, temperature: float) -> Tensor:
    """Scaled logits `[C, V]` as a fresh tensor, float32 or float64; `_NEVER` in the columns of padding."""
    precise = torch.promote_types(hidden_CE.dtype, torch.float32)
    logits_CV = (hidden_CE @ weight_VE.t()).to(precise) / temperature
    logits_CV[:, shard.real :] = _NEVER
    return logits_CV


def _add_product(total_VE: Tensor, left_VC: Tensor, right_CE: Tensor) -> None:
    """`total += left @ right`; a low-precision product is rounded once and summed in the precision of the total."""
    if total_VE.dtype == left_VC.dtype:
        total_VE.addmm_(left_VC, right_CE)
    else:
        total_VE += left_VC @ right_CE


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)


class _TokenScores(torch.autograd.Function):
    """Saves its inputs, the log-sum-exp and the entropy of each row; nothing of size V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        targets_T: Tensor,
        settings: HeadSettings,
        tp_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        shard = _Shard.of(weight_VE, settings.vocab, tp_group)
        rows = hidden_TE.shape[0]
        precise = torch.promote_types(hidden_TE.dtype, torch.float32)
        top_T = torch.empty(rows, dtype=precise, device=hidden_TE.device)
        # Per row, relative to its own maximum: target logit, sum of exp, and sum of logit * exp for the entropy.
        sums_T = torch.zeros(3 if settings.entropy else 2, rows, dtype=precise, device=hidden_TE.device)
        target_T, total_T = sums_T[0], sums_T[1]
        for part in _chunks(rows, settings.chunk_tokens):
            logits_CV = _logits(hidden_TE[part], weight_VE, shard, settings.temperature)
            top_T[part] = logits_CV.amax(-1)
            logits_CV -= top_T[part, None]
            column_C, _ = shard.locate(targets_T[part])
            target_T[part] = logits_CV.gather(-1, column_C[:, None])[:, 0]
            exp_CV = logits_CV.exp()
            total_T[part] = exp_CV.sum(-1)
            if settings.entropy:
                sums_T[2, part] = exp_CV.mul_(logits_CV).sum(-1)

        # Two collectives for the call, whatever the number of chunks: the maximum; the sums relative to it.
        local_T = top_T.clone()
        _all_reduce(top_T, dist.ReduceOp.MAX, tp_group)
        shift_T = local_T - top_T
        if settings.entropy:
            sums_T[2] = (sums_T[2] + shift_T * total_T) * shift_T.exp()
        total_T *= shift_T.exp()
        _, here_T = shard.locate(targets_T)
        sums_T[0] = torch.where(here_T, target_T + shift_T, 0.0)
        _all_reduce(sums_T, dist.ReduceOp.SUM, tp_group)

        log_total_T = total_T.log()
        logp_T = target_T - log_total_T
        entropy_T = log_total_T - sums_T[2] / total_T if settings.entropy else None
        ctx.save_for_backward(hidden_TE, weight_VE, targets_T, top_T + log_total_T, entropy_T)
        ctx.settings, ctx.tp_group, ctx.shard = settings, tp_group, shard
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TE, weight_VE, targets_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(lse_T)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden_TE = torch.zeros_like(hidden_TE) if want_hidden else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=lse_T.dtype) if want_weight else None
        for part in _chunks(hidden_TE.shape[0], ctx.settings.chunk_tokens):
            logits_CV = _logits(hidden_TE[part], weight_VE, ctx.shard, ctx.settings.temperature)
            logp_CV = logits_CV.sub_(lse_T[part, None])
            grad_CV = logp_CV.exp()
            # d logp / d logit = onehot - p;  d entropy / d logit = -p (log p + entropy)
            if grad_entropy_T is None:
                grad_CV *= -grad_logp_T[part, None]
            else:
                slope_CV = logp_CV.add_(entropy_T[part, None]).mul_(grad_entropy_T[part, None])
                grad_CV *= slope_CV.add_(grad_logp_T[part, None]).neg_()
            column_C, here_C = ctx.shard.locate(targets_T[part])
            row_C = torch.arange(len(column_C), device=column_C.device)
            grad_CV[row_C, column_C] += torch.where(here_C, grad_logp_T[part], 0.0)
            grad_CV = grad_CV.div_(ctx.settings.temperature).to(hidden_TE.dtype)
            if grad_hidden_TE is not None:
                grad_hidden_TE[part] = grad_CV @ weight_VE
            if grad_weight_VE is not None:
                _add_product(grad_weight_VE, grad_CV.t(), hidden_TE[part])
        if grad_hidden_TE is not None:
            _all_reduce(grad_hidden_TE, dist.ReduceOp.SUM, ctx.tp_group)
        if grad_weight_VE is not None:
            grad_weight_VE = grad_weight_VE.to(weight_VE.dtype)
        return grad_hidden_TE, grad_weight_VE, None, None, None
