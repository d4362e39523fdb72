"""Groups and the steps of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_branch.rollouts.config import DataConfig
from megatron_branch.rollouts.groups import plan_steps, read_groups
from megatron_branch.rollouts.synthetic import SyntheticSpec, synthetic_rollouts, write_rollouts


def file_of(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "f.jsonl"
    write_rollouts(path, synthetic_rollouts(SyntheticSpec(**{"groups": 5, "interleave": True, **changes})))
    return path


def test_groups_stand_in_order_of_their_first_row_with_rows_in_file_order(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    found = read_groups(DataConfig(rollouts=path))
    assert [group.group_id for group in found.groups] == ["g0", "g1", "g2", "g3", "g4"]
    for place, group in enumerate(found.groups):
        assert [rollout.source for rollout in group.rollouts] == [f"{path}:{place + 1 + 5 * row}" for row in range(4)]
    assert (found.skipped_rows, found.dropped_groups, found.dropped_rows) == (0, 0, 0)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_long_row_drops_its_whole_group_and_no_other(tmp_path: Path, position: str) -> None:
    place = {"first": 0, "middle": 1, "last": 3}[position]
    tails = [4, 4, 4, 4]
    tails[place] = 5
    one = synthetic_rollouts(SyntheticSpec(prefix_tokens=(12,), tail_tokens=tuple(tails)))
    others = synthetic_rollouts(SyntheticSpec(prefix_tokens=(12,), tail_tokens=(4,), groups=2))[4:]
    assert max(map(len, others)) == 16 and sum(len(row) > 16 for row in one) == 1
    renamed = [row for pair in zip(one, others, strict=True) for row in pair]
    for number, row in enumerate(renamed):
        object.__setattr__(row, "rollout_id", str(number))
    write_rollouts(tmp_path / "f.jsonl", renamed)
    found = read_groups(DataConfig(rollouts=tmp_path / "f.jsonl", max_tokens=16))
    assert [group.group_id for group in found.groups] == ["g1"] and len(found.groups[0].rollouts) == 4
    assert (found.dropped_groups, found.dropped_rows) == (1, 4)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.max_tokens = 39: every group has a longer rollout; raise it"):
        read_groups(DataConfig(rollouts=file_of(tmp_path), max_tokens=39))
    assert len(read_groups(DataConfig(rollouts=file_of(tmp_path), max_tokens=40)).groups) == 5


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    path.write_text(path.read_text() + "{}\n")
    assert read_groups(DataConfig(rollouts=path, on_bad_row="skip")).skipped_rows == 1


def test_the_vocabulary_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below the vocabulary size 3"):
        read_groups(DataConfig(rollouts=file_of(tmp_path)), vocab_size=3)


def names(steps: list[list[object]]) -> list[list[str]]:
    return [list(dict.fromkeys(rollout.group_id for rollout in step)) for step in steps]


def test_steps_in_file_order(tmp_path: Path) -> None:
    config = DataConfig(rollouts=file_of(tmp_path), groups_per_step=2)
    groups = read_groups(config).groups
    steps = plan_steps(groups, config, epoch=1)
    assert names(steps) == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert steps[1] == [*groups[2].rollouts, *groups[3].rollouts]


def test_shuffling_is_by_seed_and_epoch(tmp_path: Path) -> None:
    path = file_of(tmp_path, groups=40, fan_out=(1,))

    def order(seed: int, epoch: int) -> list[str]:
        config = DataConfig(rollouts=path, groups_per_step=7, shuffle=True, seed=seed)
        steps = plan_steps(read_groups(config).groups, config, epoch)
        assert [len(step) for step in steps] == [7, 7, 7, 7, 7, 5]
        return [name for step in names(steps) for name in step]

    assert order(0, 0) == order(0, 0)
    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(one) for one in orders}) == 4
    assert all(sorted(one) == sorted(orders[0]) and len(set(one)) == 40 for one in orders)
