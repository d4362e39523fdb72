"""Scores with the vocabulary split over ranks equal those of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.objective.logprobs import HeadSettings, TokenScores, token_scores
from megatron_branch.objective.reference import reference_scores
from tests.harness import run_ranks

# As in tests/unit/objective/test_logprobs.py.
FLOAT64 = 1e-12
ROWS, HIDDEN, VOCAB = 8, 12, 97
# Padded sizes for two ranks: the smallest; and the size that Megatron would choose, where rank 1 has only padding.
PADDED = {"last_row_is_padding": 98, "rank_1_is_all_padding": 256}


def problem(padded: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(padded, HIDDEN, dtype=torch.float64, generator=generator)
    weight[VOCAB:] *= 100  # loud padding
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    targets[:4] = torch.tensor([0, 48, 49, 96])[:rows]  # both sides of the border between the ranks
    return hidden.requires_grad_(), weight, targets


def uneven_sum(scores: TokenScores) -> Tensor:
    slope = torch.linspace(-1.0, 2.0, scores.logp_T.shape[0], dtype=torch.float64)
    total = (slope * scores.logp_T).sum()
    return total if scores.entropy_T is None else total + ((slope.flip(0) + 0.3) * scores.entropy_T).sum()


def check_against_one_rank(padded: int, rows: int, settings: HeadSettings) -> None:
    hidden, whole, targets = problem(padded, rows)
    whole.requires_grad_()
    truth = reference_scores(hidden, whole, targets, settings=settings)
    truth_hidden, truth_whole = torch.autograd.grad(uneven_sum(truth), [hidden, whole])
    rank, width = dist.get_rank(), padded // dist.get_world_size()
    mine = slice(rank * width, (rank + 1) * width)
    shard = whole.detach()[mine].clone().requires_grad_()
    scores = token_scores(hidden, shard, targets, settings=settings, tp_group=dist.group.WORLD)
    grad_hidden, grad_shard = torch.autograd.grad(uneven_sum(scores), [hidden, shard])
    pairs = [(scores.logp_T, truth.logp_T), (grad_hidden, truth_hidden), (grad_shard, truth_whole[mine])]
    if settings.entropy:
        pairs.append((scores.entropy_T, truth.entropy_T))
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=FLOAT64, atol=FLOAT64)


def count_collectives(rows: int, settings: HeadSettings) -> int:
    calls = 0
    original = dist.all_reduce

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        check_against_one_rank(98, rows, settings)
    finally:
        dist.all_reduce = original
    return calls


def every_case() -> dict[str, int]:
    settings = HeadSettings(temperature=0.7, vocab=VOCAB, chunk_tokens=3, entropy=True)
    for padded in PADDED.values():
        for chunk_tokens in (1, 3, 8, None):
            for entropy in (False, True):
                check_against_one_rank(padded, ROWS, replace(settings, chunk_tokens=chunk_tokens, entropy=entropy))
    return {
        "no rows": count_collectives(0, settings),
        "one chunk": count_collectives(ROWS, replace(settings, chunk_tokens=None)),
        "many chunks": count_collectives(ROWS, replace(settings, chunk_tokens=1)),
    }


def test_two_ranks_equal_one() -> None:
    counts = run_ranks(2, every_case)
    # Forward: maximum, sums. Backward: hidden gradient. The number does not depend on rows or chunks.
    assert counts == [{"no rows": 3, "one chunk": 3, "many chunks": 3}] * 2
