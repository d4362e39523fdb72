"""Token losses: pure functions of log-probs.

Shapes: T rows of a unit (distinct trained positions), E entries: one per (trained token, rollout). A token that several
rollouts share has one row and as many entries as rollouts, each with its own advantage, old log-prob and clip state, so
its gradient is the sum over the rollouts, whatever the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_branch.objective.config import KlEstimator, ObjectiveConfig
from megatron_branch.objective.logprobs import TokenScores


@dataclass(frozen=True, slots=True)
class LossTable:
    """What the loss of one unit needs besides its scores; all `[E]`, on the device of the scores.

    Attributes:
        entry_row: int64, the entry's row among the unit's scores.
        weight_E: weight of the entry in the step's loss, already divided by the step's denominator.
        advantage_E: advantage of the token in its rollout.
        old_logp_E: log-prob under the policy that the ratio is taken against, in nats; NaN stands for the current one,
            detached.
        ref_logp_E: log-prob under the reference policy, in nats; needed when `kl_coefficient` is not 0.
    """

    entry_row: Tensor
    weight_E: Tensor
    advantage_E: Tensor
    old_logp_E: Tensor
    ref_logp_E: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """Detached sums over entries, as float64 scalars; `+` joins passes, so `sum(parts, start=LossSums.zero(device))`.

    Attributes:
        loss: the loss itself: policy, KL and entropy terms.
        pg_loss: weighted policy loss.
        kl_loss: weighted KL penalty, without its coefficient; 0 when the coefficient is 0.
        entropy: unweighted, in nats.
        clipped: number of entries whose ratio was clipped.
        old_minus_new: old minus current log-prob, unweighted, in nats.
        entries: number of entries.
        max_log_ratio: largest |current - old log-prob| in nats: the only field that is joined by maximum.
    """

    loss: Tensor
    pg_loss: Tensor
    kl_loss: Tensor
    entropy: Tensor
    clipped: Tensor
    old_minus_new: Tensor
    entries: Tensor
    max_log_ratio: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> LossSums:
        """The sums of no entries: where a rank or stage starts, and what one without a loss contributes."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def __add__(self, other: LossSums) -> LossSums:
        added = {name: getattr(self, name) + getattr(other, name) for name in ADDED_FIELDS}
        return LossSums(**added, max_log_ratio=torch.maximum(self.max_log_ratio, other.max_log_ratio))


ADDED_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(LossSums) if field.name != "max_log_ratio")


def policy_loss(
    logp_E: Tensor, old_logp_E: Tensor, advantage_E: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient loss of each entry (PPO; separate bounds as in DAPO).

    `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` with `ratio = exp(logp - old_logp)`. The gradient of
    a clipped entry is exactly 0, also where its ratio overflows; so is that of an entry whose advantage is 0.

    Args:
        logp_E: current log-probs in nats.
        old_logp_E: log-probs that the ratio is taken against, constant.
        advantage_E: advantages, constant.
        clip_low: the ratio of a negative advantage counts down to `1 - clip_low`.
        clip_high: the ratio of a positive advantage counts up to `1 + clip_high`.

    Returns:
        The loss `[E]`, and True where the clip is active `[E]`.
    """
    log_ratio_E = logp_E - old_logp_E
    unclipped_E = log_ratio_E.detach().exp()
    above_E = (advantage_E > 0) & (unclipped_E > 1 + clip_high)
    below_E = (advantage_E < 0) & (unclipped_E < 1 - clip_low)
    clipped_E = above_E | below_E
    # The exponent is replaced, not the product: 0 * inf would be NaN in the product and in its gradient.
    constant_E = clipped_E | (advantage_E == 0)
    ratio_E = torch.where(constant_E, 0.0, log_ratio_E).exp()
    ratio_E = torch.where(above_E, 1 + clip_high, torch.where(below_E, 1 - clip_low, ratio_E))
    return -ratio_E * advantage_E, clipped_E


def kl_penalty(logp_E: Tensor, ref_logp_E: Tensor, estimator: KlEstimator) -> Tensor:
    """Penalty of each entry for leaving the reference policy, to be differentiated as part of the *loss*.

    With d = logp - ref_logp on a token sampled from the current policy p, q the reference (Schulman's estimators):

    - `k1` = d estimates KL(p, q) without bias, but as a loss its expected gradient is 0: it pulls nowhere and only
      adds noise. Use it to monitor.
    - `k2` = d^2 / 2 is a biased estimate; its expected gradient is that of KL(p, q).
    - `k3` = exp(-d) - 1 + d estimates KL(p, q) without bias; its expected gradient is that of KL(q, p).

    The statements hold for tokens sampled from p; no importance weight corrects for tokens of an older policy.

    Returns:
        The penalty `[E]`; >= 0 for k2 and k3.
    """
    difference_E = logp_E - ref_logp_E
    if estimator == "k1":
        return difference_E
    if estimator == "k2":
        return difference_E.square() / 2
    assert estimator == "k3", estimator
    return torch.expm1(-difference_E) + difference_E  # expm1: no cancellation against 1 for a small difference


def token_loss(scores: TokenScores, table: LossTable, config: ObjectiveConfig) -> tuple[Tensor, LossSums]:
    """Loss of one unit: `sum_E weight * (policy + kl_coefficient * kl - entropy_coefficient * entropy)`.

    A plain weighted sum: losses of units, and of ranks with different entries, add up to the loss of the step.

    Args:
        scores: of the unit's rows, entropies included (`actor/entropy` needs them).
        table: entries of the unit, in any order; none gives a loss of 0 that still has a graph to the scores.
        config: clip bounds, KL and entropy coefficients.

    Returns:
        The loss, a scalar, and its detached sums.
    """
    assert scores.entropy_T is not None, "the scores of a loss need HeadSettings.entropy"
    logp_E, entropy_E = scores.logp_T[table.entry_row], scores.entropy_T[table.entry_row]
    old_logp_E = torch.where(table.old_logp_E.isnan(), logp_E.detach(), table.old_logp_E)
    policy_E, clipped_E = policy_loss(
        logp_E, old_logp_E, table.advantage_E, clip_low=config.clip_low, clip_high=config.clip_above
    )
    pg_loss = loss = (table.weight_E * policy_E).sum()
    kl_loss = torch.zeros_like(loss)
    # A term is left out, not multiplied by 0, when its coefficient is 0: no gradient is computed for it.
    if config.kl_coefficient != 0:
        assert table.ref_logp_E is not None, "a KL penalty needs the reference log-probs"
        kl_loss = (table.weight_E * kl_penalty(logp_E, table.ref_logp_E, config.kl_estimator)).sum()
        loss = loss + config.kl_coefficient * kl_loss
    if config.entropy_coefficient != 0:
        loss = loss - config.entropy_coefficient * (table.weight_E * entropy_E).sum()

    with torch.no_grad():
        log_ratio_E = (logp_E - old_logp_E).double()
        sums = LossSums(
            loss=loss.detach().double(),
            pg_loss=pg_loss.detach().double(),
            kl_loss=kl_loss.detach().double(),
            entropy=entropy_E.double().sum(),
            clipped=clipped_E.double().sum(),
            old_minus_new=-log_ratio_E.sum(),
            entries=torch.full_like(log_ratio_E.sum(), log_ratio_E.numel()),
            max_log_ratio=torch.cat([log_ratio_E.new_zeros(1), log_ratio_E.abs()]).max(),
        )
    return loss, sums
