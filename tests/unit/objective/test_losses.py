"""Token losses: tables of values and gradients, exact enumeration, shared rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_branch.objective.config import KlEstimator, ObjectiveConfig
from megatron_branch.objective.logprobs import HeadSettings, TokenScores, token_scores
from megatron_branch.objective.losses import LossSums, LossTable, kl_penalty, policy_loss, token_loss

# A handful of float64 operations on numbers of order 1.
FLOAT64 = 1e-14
LOW, HIGH = 0.2, 0.28


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=FLOAT64, atol=FLOAT64)


def loss_and_slope(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, its derivative by the current log-prob, and the clip flag, of one entry."""
    old = vector(-1.5)
    logp = (old + math.log(ratio)).requires_grad_()
    loss, clipped = policy_loss(logp, old, vector(advantage), clip_low=LOW, clip_high=HIGH)
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    return loss.item(), slope.item(), bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (0.5, 1.0, -0.5, False),
        (0.9, 1.0, -0.9, False),
        (1.25, 1.0, -1.25, False),
        (1.5, 1.0, -1.28, True),
        (4.0, 1.0, -1.28, True),
        (0.5, -1.0, 0.8, True),
        (0.9, -1.0, 0.9, False),
        (1.25, -1.0, 1.25, False),
        (1.5, -1.0, 1.5, False),
        (4.0, -1.0, 4.0, False),
    ],
)
def test_clip_table(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    ours, slope, flag = loss_and_slope(ratio, advantage)
    assert ours == pytest.approx(loss, rel=FLOAT64)
    assert flag is clipped
    if clipped:
        assert slope == 0.0
    else:
        assert slope == pytest.approx(loss, rel=FLOAT64)  # d(-ratio A) / d logp is the loss itself


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_overflowing_ratio_without_effect_leaves_no_nan(advantage: float) -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    loss, _ = policy_loss(logp, torch.tensor([-200.0]), torch.tensor([advantage]), clip_low=LOW, clip_high=HIGH)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-advantage * (1 + HIGH))
    assert logp.grad.item() == 0.0


def test_ratio_one_is_the_plain_policy_gradient() -> None:
    ours, slope, clipped = loss_and_slope(1.0, -3.0)
    assert (ours, slope, clipped) == (3.0, 3.0, False)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_kl_gradient_by_enumeration(estimator: KlEstimator) -> None:
    """All four answers of a one-token policy, weighted by their probability, give what the docstring says."""
    logits = vector(0.3, -1.2, 0.9, 2.0).requires_grad_()
    ref = torch.log_softmax(vector(1.0, 0.1, -0.7, 0.4), 0)
    logp = torch.log_softmax(logits, 0)
    penalty = kl_penalty(logp, ref, estimator)
    probability = logp.detach().exp()
    (ours,) = torch.autograd.grad((probability * penalty).sum(), logits, retain_graph=True)
    forward = (logp.exp() * (logp - ref)).sum()
    reverse = (ref.exp() * (ref - logp)).sum()
    expected = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": torch.autograd.grad(forward, logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(reverse, logits)[0],
    }
    same(ours, expected[estimator])
    if estimator in ("k1", "k3"):
        same((probability * penalty).sum(), forward)


def test_k3_is_stable_for_a_small_difference() -> None:
    """exp(-d) - 1 + d in float32 has an error of about 6e-8 where the value is d^2 / 2 = 5e-9."""
    penalty = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert penalty.item() == pytest.approx(5e-9, rel=2e-3)


CONFIG = ObjectiveConfig(
    clip_low=LOW, clip_high=HIGH, kl_coefficient=0.3, kl_estimator="k3", entropy_coefficient=0.05, temperature=0.7
)


def head() -> tuple[Tensor, Tensor, Tensor, HeadSettings]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator)
    settings = HeadSettings(temperature=CONFIG.temperature, vocab=11, chunk_tokens=2, entropy=True)
    return hidden, weight, torch.tensor([4, 0, 10]), settings


def scores_of(hidden: Tensor) -> TokenScores:
    _, weight, targets, settings = head()
    return token_scores(hidden, weight, targets, settings=settings)


def table(scores: TokenScores) -> LossTable:
    """Three rollouts over three rows; row 1 is shared by all. Ratios 1, 4, 0.5, 0.9 and one current old log-prob."""
    entry_row = torch.tensor([0, 1, 1, 1, 2])
    logp = scores.logp_T.detach()[entry_row]
    ratio = vector(0.9, 4.0, 0.5, 1.1, float("nan"))
    return LossTable(
        entry_row=entry_row,
        weight_E=vector(0.1, 0.2, 0.3, 0.15, 0.25),
        advantage_E=vector(1.0, 2.0, 0.5, -1.0, -2.0),
        old_logp_E=logp - ratio.log(),
        ref_logp_E=logp + vector(0.1, -0.4, 0.2, 0.0, 0.6),
    )


def rows_of(full: LossTable, entries: list[int]) -> LossTable:
    assert full.ref_logp_E is not None
    picked = (full.entry_row, full.weight_E, full.advantage_E, full.old_logp_E, full.ref_logp_E)
    return LossTable(*(column[entries] for column in picked))


def by_the_book(hidden: Tensor, full: LossTable) -> Tensor:
    """One entry at a time, with min and clamp as the papers write it."""
    scores = scores_of(hidden)
    assert scores.entropy_T is not None and full.ref_logp_E is not None
    total = torch.zeros((), dtype=torch.float64)
    for entry, row in enumerate(full.entry_row.tolist()):
        logp, advantage = scores.logp_T[row], full.advantage_E[entry]
        old = full.old_logp_E[entry]
        ratio = (logp - (logp.detach() if old.isnan() else old)).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        gap = full.ref_logp_E[entry] - logp
        kl = gap.exp() - gap - 1
        term = policy + CONFIG.kl_coefficient * kl - CONFIG.entropy_coefficient * scores.entropy_T[row]
        total = total + full.weight_E[entry] * term
    return total


def test_token_loss_equals_the_sum_over_rollouts_of_each_row() -> None:
    """Row 1 carries a clipped and two unclipped rollouts: its gradient is their sum, not that of any average."""
    hidden = head()[0]
    scores = scores_of(hidden)
    loss, _ = token_loss(scores, table(scores), CONFIG)
    truth = by_the_book(hidden, table(scores))
    same(loss, truth)
    same(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(truth, hidden)[0])


def test_shared_row_with_one_clipped_rollout_keeps_the_others_gradient() -> None:
    hidden = head()[0]
    scores = scores_of(hidden)
    config = ObjectiveConfig(clip_low=LOW, clip_high=HIGH)
    full = table(scores)
    both, _ = token_loss(scores, rows_of(full, [1, 2]), config)  # advantage 2 at ratio 4, advantage 0.5 at ratio 0.5
    (slope,) = torch.autograd.grad(both, scores.logp_T)
    same(slope, vector(0.0, -0.3 * 0.5 * 0.5, 0.0))  # -weight * ratio * advantage of the second alone


def test_units_add_up() -> None:
    hidden = head()[0]
    scores = scores_of(hidden)
    full = table(scores)
    whole, whole_sums = token_loss(scores, full, CONFIG)
    parts = [token_loss(scores, rows_of(full, entries), CONFIG) for entries in ([3, 0], [], [4, 2, 1])]
    same(sum(loss for loss, _ in parts), whole)
    joined = sum((sums for _, sums in parts), start=LossSums.zero(hidden.device))
    for name in LossSums.__dataclass_fields__:
        same(getattr(joined, name), getattr(whole_sums, name))


def test_sums() -> None:
    scores = scores_of(head()[0])
    full = table(scores)
    loss, sums = token_loss(scores, full, CONFIG)
    ratio = vector(0.9, 4.0, 0.5, 1.1, 1.0)
    assert scores.entropy_T is not None and full.ref_logp_E is not None
    gap = vector(0.1, -0.4, 0.2, 0.0, 0.6)
    policy = -vector(0.9, 1 + HIGH, 0.5, 1.1, 1.0) * full.advantage_E
    same(sums.loss, loss)
    same(sums.pg_loss, (full.weight_E * policy).sum())
    same(sums.kl_loss, (full.weight_E * (gap.exp() - gap - 1)).sum())
    same(sums.entropy, scores.entropy_T[full.entry_row].sum())
    same(sums.clipped, torch.tensor(1.0, dtype=torch.float64))
    same(sums.old_minus_new, -ratio.log().sum())
    same(sums.entries, torch.tensor(5.0, dtype=torch.float64))
    same(sums.max_log_ratio, torch.tensor(math.log(4), dtype=torch.float64))
    assert not any(getattr(sums, name).requires_grad for name in LossSums.__dataclass_fields__)


def test_no_entries_give_a_zero_loss_with_a_graph() -> None:
    hidden = head()[0]
    scores = scores_of(hidden)
    loss, sums = token_loss(scores, rows_of(table(scores), []), CONFIG)
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], torch.zeros_like(hidden))
    assert all(getattr(sums, name).item() == 0.0 for name in LossSums.__dataclass_fields__)


def test_term_with_coefficient_zero_is_left_out() -> None:
    scores = scores_of(head()[0])
    full = table(scores)
    plain = LossTable(full.entry_row, full.weight_E, full.advantage_E, full.old_logp_E)
    loss, sums = token_loss(scores, plain, ObjectiveConfig(clip_low=LOW, clip_high=HIGH))
    same(sums.pg_loss, loss.detach())
    assert sums.kl_loss.item() == 0.0


def test_one_clip_bound_serves_both_sides() -> None:
    scores = TokenScores(vector(math.log(1.25)).requires_grad_(), vector(0.0))
    one = LossTable(torch.tensor([0]), vector(1.0), vector(1.0), vector(0.0))
    assert token_loss(scores, one, ObjectiveConfig(clip_low=0.2))[0].item() == pytest.approx(-1.2)
    assert token_loss(scores, one, ObjectiveConfig(clip_low=0.2, clip_high=0.28))[0].item() == pytest.approx(-1.25)
