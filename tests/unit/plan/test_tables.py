"""Index tables of units against a loop over rollouts and tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.tables import loss_rows, unit_inputs
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.branching import CONFIGS, planned, rollout, steps


def test_a_pack_of_two_tails_and_a_duplicate() -> None:
    rows = [
        rollout([0, 1, 2, 3, 4], [3, 4]),
        rollout([0, 1, 2, 7, 8, 9], [3, 5]),
        rollout([0, 1, 2, 3, 4], [4]),
    ]
    plan, trees = planned(rows)
    tail = plan.ranks[0].units[1]
    table = loss_rows(tail, trees, rows)
    assert table.rows.tolist() == [0, 1, 2, 4]
    assert table.targets.tolist() == [3, 4, 7, 9]
    entries = zip(table.entry_row, table.entry_rollout, table.entry_token, strict=True)
    assert sorted(tuple(map(int, entry)) for entry in entries) == [
        (0, 0, 3),
        (1, 0, 4),
        (1, 2, 4),
        (2, 1, 3),
        (3, 1, 5),
    ]
    ids, positions = unit_inputs(tail, trees, rows)
    assert ids.tolist() == [2, 3, 2, 7, 8]
    assert positions.tolist() == [2, 3, 2, 3, 4]


def check(rows: list[Rollout], config: BranchConfig) -> None:
    """Every trained token once, under the input before it, with its own id; every rollout is fed its own ids."""
    plan, trees = planned(rows, config=config, dp=2)
    seen: list[tuple[int, int]] = []
    for unit in (unit for rank in plan.ranks for unit in rank.units):
        ids, positions = unit_inputs(unit, trees, rows)
        table = loss_rows(unit, trees, rows)
        assert all(array.dtype == np.int64 for array in (ids, positions, table.rows, table.targets, table.entry_token))
        assert len(ids) == len(positions) == unit.tokens
        assert np.all(np.diff(table.rows) > 0)
        assert set(table.entry_row.tolist()) == set(range(len(table.rows)))
        assert unit.trained == (len(table.rows) > 0)
        for row, member, token in zip(table.entry_row, table.entry_rollout, table.entry_token, strict=True):
            offset = table.rows[row]
            assert positions[offset] == token - 1
            assert ids[offset] == rows[member].token_ids[token - 1]
            assert table.targets[row] == rows[member].token_ids[token]
            seen.append((int(member), int(token)))
    trained = [(index, int(token)) for index, row in enumerate(rows) for token in np.flatnonzero(row.loss_mask)]
    assert sorted(seen) == trained


@given(steps(), CONFIGS)
@settings(max_examples=100, deadline=None)
def test_every_trained_token_has_one_entry(rows: list[Rollout], config: BranchConfig) -> None:
    check(rows, config)


def test_every_trained_token_of_the_odd_step_has_one_entry() -> None:
    check(odd_rollouts(vocab_size=97, seed=1), BranchConfig(chunk_tokens=7))


def test_a_step_of_a_million_positions_is_tabled_in_numpy() -> None:
    """A loop over tokens in Python would make this test take seconds."""
    prompt = np.arange(100_000, dtype=np.int64) % 97
    rows = []
    for index in range(10):
        ids = np.concatenate([prompt, [100 + index]])
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[1::2] = True
        rows.append(
            Rollout(group_id="g", rollout_id=str(index), token_ids=ids, loss_mask=mask, prompt_length=1, reward=0.0)
        )
    plan, trees = planned(rows)
    tables = [loss_rows(unit, trees, rows) for unit in plan.ranks[0].units]
    assert sum(len(table.entry_token) for table in tables) == plan.trained_tokens == 10 * 50_000
