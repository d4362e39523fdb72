"""The plan as text and its digest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.serial import digest, from_json, to_json
from megatron_branch.rollouts.record import Rollout
from tests.branching import CONFIGS, planned, prompt_with_tails, steps


@given(steps(), CONFIGS)
@settings(max_examples=50, deadline=None)
def test_a_plan_reads_back_equal(rows: list[Rollout], config: BranchConfig) -> None:
    plan, _ = planned(rows, config=config, dp=2, aggregation="seq-mean-token-mean")
    back = from_json(to_json(plan))
    assert back == plan
    assert hash(back) == hash(plan)
    assert digest(back, rows) == digest(plan, rows)


def test_the_digest_sees_every_difference() -> None:
    rows = prompt_with_tails(5, [2, 3])
    plan, _ = planned(rows)
    ids = rows[1].token_ids.copy()
    ids[2] += 1
    mask = rows[1].loss_mask.copy()
    mask[-1] = False
    other_plan, _ = planned(rows, config=BranchConfig(pack_tokens=2))
    digests = {
        digest(plan, rows),
        digest(other_plan, rows),
        digest(replace(plan, row_weights=tuple(np.nextafter(plan.row_weights, 1).tolist())), rows),
        digest(plan, [rows[0], replace(rows[1], token_ids=ids)]),
        digest(plan, [rows[0], replace(rows[1], loss_mask=mask)]),
        digest(plan, rows[::-1]),
    }
    assert len(digests) == 6
