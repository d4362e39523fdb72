"""Weights of the rows: every denominator of the step, computed once.

Always true:
- a weight depends on the whole step's rollouts and the aggregation mode, never on ranks, trees, chunks or packs;
- the weight of a row without a trained token is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_branch.plan.plan import Aggregation
from megatron_branch.rollouts.record import Rollout


def row_weights(rollouts: Sequence[Rollout], aggregation: Aggregation) -> tuple[float, ...]:
    """Weight of each trained token of each rollout (the modes are verl's).

    Args:
        rollouts: all rollouts of the step, over all ranks.
        aggregation: `token-mean` divides by the step's trained tokens; `seq-mean-token-sum` by the number of rows that
            train at least one token; `seq-mean-token-mean` by that number and by the row's own trained tokens.

    Raises:
        ValueError: no rollout trains a token.
    """
    trained = [rollout.trained_tokens for rollout in rollouts]
    tokens = sum(trained)
    rows = sum(count > 0 for count in trained)
    if tokens == 0:
        first = rollouts[0].source if rollouts else "an empty step"
        raise ValueError(
            f"no token is trained in this step of {len(rollouts)} rollouts (first row: {first}): a step needs at least "
            "one loss_mask entry of 1 after position 0; drop these groups or correct their loss_mask or prompt_length"
        )
    if aggregation == "token-mean":
        return tuple(1.0 / tokens if count else 0.0 for count in trained)
    if aggregation == "seq-mean-token-sum":
        return tuple(1.0 / rows if count else 0.0 for count in trained)
    return tuple(1.0 / (rows * count) if count else 0.0 for count in trained)
