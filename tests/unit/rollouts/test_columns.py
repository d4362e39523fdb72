"""Columns of a row against `json.loads`, and the memory of a large one."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_branch.rollouts import columns
from megatron_branch.rollouts.columns import NumberList, RowError, parse_row

LIMITS = {"low": 0, "high": 9, "rule": "must be 0..9", "remedy": "repair it"}
TREACHEROUS = st.sampled_from(['"', "\\", '\\"', "]", "[", "{", "}", ",", ": [1", "a", "é", "\n"])
TEXT = st.lists(TREACHEROUS, max_size=6).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3))


def plain(value: object) -> object:
    """A value of `parse_row` as `json.loads` gives it."""
    if not isinstance(value, NumberList):
        return value
    return json.loads(b"[" + value.line[value.start : value.end] + b"]")


@settings(deadline=None)
@given(row=st.dictionaries(TEXT, VALUES, max_size=5), compact=st.booleans(), ascii_only=st.booleans())
def test_every_field_is_what_json_gives(row: dict[str, object], compact: bool, ascii_only: bool) -> None:
    separators = (",", ":") if compact else (" , ", " : ")
    line = json.dumps(row, separators=separators, ensure_ascii=ascii_only).encode()
    parsed = parse_row(line)
    assert {field: plain(value) for field, value in parsed.items()} == row
    for field, value in row.items():
        numbers = isinstance(value, list) and not any(isinstance(entry, (str, list, dict)) for entry in value)
        assert isinstance(parsed[field], NumberList) == numbers, "flat lists, and only they, stay text"


@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", ["", " ", "0", "1,2,3", " 1 , 9,\t0 ", "1,1,1,1,1,1,1,1,1"])
def test_integers_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, text: str) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", piece_bytes)
    values = parse_row(f'{{"a": [{text}], "b": 1}}'.encode())["a"]
    array = values.integers("a", np.int64, **LIMITS)
    assert array.dtype == np.int64 and array.tolist() == json.loads(f"[{text}]") and len(values) == len(array)


@pytest.mark.parametrize("piece_bytes", [1, 4, 1000])
def test_reals_keep_every_bit_and_null_is_nan(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", piece_bytes)
    expected = [-0.1, None, 1e-300, -1.2345678901234567, 3, float("nan"), float("-inf")]
    array = parse_row(json.dumps({"a": expected}).encode())["a"].reals("a")
    np.testing.assert_array_equal(array, [np.nan if value is None else value for value in expected])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1,10,3", r"a\[2\] = 10: must be 0..9"),
        ("0,-1", r"a\[1\] = -1: must be 0..9"),
        ("0,1,2.0", r"a\[2\] = 2.0: must be 0..9"),
        ("0,true", r"a\[1\] = true: must be 0..9"),
        ("null", r"a\[0\] = null: must be 0..9"),
        ("99999999999999999999999", r"a\[0\] = 9+: must be 0..9"),
        ("1,,2", "flat JSON list of numbers"),
        ("1,2,", "flat JSON list of numbers"),
        ("1, ", "flat JSON list of numbers"),
        (",", "flat JSON list of numbers"),
        ("1 2", "flat JSON list of numbers"),
        ("01", "flat JSON list of numbers"),
        ("0x1", "flat JSON list of numbers"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_a_bad_integer_is_named(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, text: str, message: str) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", piece_bytes)
    with pytest.raises(RowError, match=message):
        parse_row(f'{{"a": [{text}]}}'.encode())["a"].integers("a", np.int64, **LIMITS)


@pytest.mark.parametrize(("text", "message"), [("0,true", r"a\[1\] = true"), ("1" + "0" * 400, "beyond float64")])
def test_a_bad_real_is_named(text: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        parse_row(f'{{"a": [{text}]}}'.encode())["a"].reals("a")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"}",
        b'{"a',
        b'{"a": [1',
        b'{"a": 1} {"b": 2}',
        b"[1]",
        b'["a": [1]]',
        b"3",
        b'{"a": \xff}',
        b'{"\xff": 1}',
        b"[" * 100_000,
        b'{"a": [1], "a": [2]}',
        b'\xef\xbb\xbf{"a": 1}',
    ],
    ids=lambda line: repr(line[:20]),
)
def test_what_is_not_an_object_is_refused(line: bytes) -> None:
    with pytest.raises(RowError):
        parse_row(line)


def test_unread_lists_are_never_parsed() -> None:
    assert parse_row(b'{"a": [not json], "b": 1}')["b"] == 1


def test_fields_asked_for_whole_are_python_lists() -> None:
    assert parse_row(b'{"a": [1, 2], "b": [3]}', whole=("a",))["a"] == [1, 2]


def test_memory_of_a_column_is_its_array_and_a_piece() -> None:
    count = 200_000
    line = b'{"a": [' + b",".join([b"123456"] * count) + b"]}"
    tracemalloc.start()
    try:
        parse_row(line)["a"].integers("a", np.int64, low=0, high=1 << 20, rule="", remedy="")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A piece of 64 KiB holds at most 9,363 ids of 7 bytes: 36 + 8 bytes each as a list, twice while it is copied.
    assert peak < 8 * count + 2 * 9_363 * 44 + 3 * 65_536
