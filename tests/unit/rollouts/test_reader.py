"""Files: lines, compression, bad rows, memory."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_branch.rollouts.reader import read_rollouts

GOOD = {"group_id": "g", "token_ids": [5, 6, 7], "prompt_length": 1, "reward": 1}
BAD = GOOD | {"reward": "1"}


def write(path: Path, rows: list[object]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_rows_come_in_file_order_with_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [GOOD | {"group_id": "b"}, "", GOOD | {"group_id": "a"}])
    rollouts = list(read_rollouts(path))
    assert [rollout.group_id for rollout in rollouts] == ["b", "a"]
    assert [rollout.source for rollout in rollouts] == [f"{path}:1", f"{path}:3"]
    assert rollouts[1].rollout_id == f"{path}:3"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_last_line_may_end_anyhow(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes((json.dumps(GOOD) + ending).encode())
    assert len(list(read_rollouts(path))) == 1


def test_gzip_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(GOOD) + "\n")
    assert next(read_rollouts(path)).token_ids.tolist() == [5, 6, 7]


def test_it_streams(tmp_path: Path) -> None:
    reader = read_rollouts(write(tmp_path / "f.jsonl", [GOOD, "broken"]))
    assert next(reader).group_id == "g"
    with pytest.raises(ValueError, match="2: row"):
        next(reader)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, BAD], 'f.jsonl:2: reward = "1": must be a finite number; remove the quotes'),
        ([GOOD, "{broken"], "f.jsonl:2: row = .*is not valid JSON"),
        ([GOOD, '{"group_id": "g"'], "f.jsonl:2: row = .*is not valid JSON"),
        (['{"group_id": "g", "token_ids": [1, 2], "prompt_length": 1, "reward": NaN}'], "f.jsonl:1: reward = NaN"),
        ([GOOD | {"rollout_id": "a"}, GOOD, GOOD | {"rollout_id": "a"}], '3: rollout_id = "a": .*line 1 has it'),
        ([GOOD | {"token_ids": [5, 6, 50]}], r"f.jsonl:1: token_ids\[2\] = 50: .*vocabulary size 50"),
        ([], "f.jsonl: no rollouts, it is empty"),
        (["", ""], "f.jsonl: no rollouts, it is empty"),
    ],
    ids=["bad reward", "broken json", "cut off", "nan", "same id", "vocabulary", "empty", "blank lines"],
)
def test_errors_say_where(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_rollouts(write(tmp_path / "f.jsonl", rows), vocab_size=50))
    assert not list(tmp_path.glob("*.tmp"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.jsonl: cannot be read .No such file.*; name a readable"):
        list(read_rollouts(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_rollouts(tmp_path))
    with pytest.raises(ValueError, match="plain.jsonl.gz: cannot be read .Not a gzipped file"):
        list(read_rollouts(write(tmp_path / "plain.jsonl.gz", [GOOD])))
    with gzip.open(tmp_path / "whole.gz", "wb") as file:
        file.write((json.dumps(GOOD) + "\n").encode() * 50)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((tmp_path / "whole.gz").read_bytes()[:-12])
    with pytest.raises(ValueError, match="cut.jsonl.gz.*cannot be read"):
        list(read_rollouts(cut))


def test_skipped_rows_are_counted_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [GOOD, BAD, GOOD, "{bröken", GOOD])
    reader = read_rollouts(path, on_bad_row="skip")
    assert next(reader).source.endswith(":1") and next(reader).source.endswith(":3")
    assert reader.skipped == 1 and not reader.rejected_path.exists(), "not before the file has been read"
    assert len(list(reader)) == 1 and reader.skipped == 2
    assert reader.rejected_path == tmp_path / "f.jsonl.rejected.jsonl"
    rejected = [json.loads(line) for line in reader.rejected_path.read_text().splitlines()]
    assert [entry["line"] for entry in rejected] == [2, 4]
    assert json.loads(rejected[0]["row"]) == BAD and rejected[1]["row"] == "{bröken"
    assert "remove the quotes" in rejected[0]["error"]
    assert len(list(tmp_path.iterdir())) == 2, "nothing temporary is left"


def test_no_file_of_rejects_without_rejects_or_before_the_end(tmp_path: Path) -> None:
    list(read_rollouts(write(tmp_path / "good.jsonl", [GOOD]), on_bad_row="skip"))
    reader = read_rollouts(write(tmp_path / "bad.jsonl", [BAD, GOOD, GOOD]), on_bad_row="skip")
    next(reader)
    del reader
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "good.jsonl"]


def test_a_skipped_row_does_not_take_its_id(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [BAD | {"rollout_id": "a"}, GOOD | {"rollout_id": "a"}])
    assert [rollout.rollout_id for rollout in read_rollouts(path, on_bad_row="skip")] == ["a"]


def test_all_rows_skipped_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [BAD, BAD])
    with pytest.raises(ValueError, match="no rollouts, all 2 rows were rejected"):
        list(read_rollouts(path, on_bad_row="skip"))
    assert (tmp_path / "f.jsonl.rejected.jsonl").exists(), "the reasons are there to read"


def test_a_row_of_two_million_tokens_in_bounded_memory(tmp_path: Path) -> None:
    count = 2_000_000
    ids = np.arange(count) % 150_000
    path = tmp_path / "f.jsonl"
    path.write_text(f'{{"group_id": 1, "prompt_length": 9, "reward": 1, "token_ids": {json.dumps(ids.tolist())}}}\n')
    tracemalloc.start()
    try:
        rollout = next(read_rollouts(path, vocab_size=150_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * path.stat().st_size
    np.testing.assert_array_equal(rollout.token_ids, ids)
    assert rollout.trained_tokens == count - 9
