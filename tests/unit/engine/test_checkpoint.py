"""Which checkpoints of a folder go when a new one is written."""

from pathlib import Path

import pytest

from megatron_branch.engine.checkpoint import outdated


@pytest.mark.parametrize(
    ("step", "keep", "gone"),
    [(12, 1, [2, 9, 10]), (12, 2, [2, 9]), (12, 5, []), (9, 1, [2]), (2, 1, [])],
    ids=["one stays", "by number, not by name", "fewer than allowed", "later ones are another run's", "the first"],
)
def test_the_newest_up_to_the_step_stay(tmp_path: Path, step: int, keep: int, gone: list[int]) -> None:
    for number in (2, 9, 10, 12):
        (tmp_path / f"global_step_{number}").mkdir()
        (tmp_path / f"global_step_{number}_hf").mkdir()
    (tmp_path / ".global_step_12.partial").mkdir()
    (tmp_path / "latest").write_text("global_step_12")
    assert outdated(tmp_path, step=step, keep=keep) == [tmp_path / f"global_step_{number}" for number in gone]
