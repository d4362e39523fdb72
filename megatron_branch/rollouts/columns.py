"""From a line of JSON to its columns, without a Python object per token.

A row of two million ids is 14 MB of text, but 80 MB as a Python list. So flat lists at the top level are cut out of the
line and stay text until a column is asked for; then they are parsed piece by piece into one array. Lists that nobody
asks for are never parsed.

Always true:
- the value of every other field is what `json.loads` gives;
- beyond the line itself, parsing a column takes the memory of its array and of one piece;
- an error names the field, its value, the rule and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_branch.rollouts.record import Reals

PIECE_BYTES = 1 << 16
_STRUCTURE = re.compile(rb'["\[\]{}]')
_BLANK = re.compile(rb"[ \t\r\n]*")
_COLON = re.compile(rb"[ \t\r]*:[ \t\r]*(\[?)")
_REALS = {int, float, type(None)}
_Scalar = TypeVar("_Scalar", bound=np.generic)


class RowError(ValueError):
    """A row that cannot be used: `field = value: rule; remedy`."""

    def __init__(self, field: str, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{field} {value}: {rule}; {remedy}")


def shown(value: object) -> str:
    """`= VALUE` as JSON writes it, shortened, for an error message."""
    text = json.dumps(value, default=repr)
    return f"= {text if len(text) <= 60 else text[:57] + '...'}"


def read_only(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The same array, not writeable any more."""
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class NumberList:
    """The text of a flat JSON list: `line[start:end)` without its brackets."""

    line: bytes
    start: int
    end: int

    def __len__(self) -> int:
        if _BLANK.fullmatch(self.line, self.start, self.end):
            return 0
        return self.line.count(b",", self.start, self.end) + 1

    def _pieces(self, field: str) -> Iterator[tuple[int, list[Any]]]:
        """Yield the index of the first entry and the entries of each piece."""
        count, total, at = 0, len(self), self.start
        while at < self.end and total:
            stop = self.line.find(b",", min(at + PIECE_BYTES, self.end), self.end)
            stop = self.end if stop < 0 else stop
            try:
                values = json.loads(b"[" + self.line[at:stop] + b"]")
            except ValueError:
                raise _not_numbers(field, self.line[at : min(stop, at + 80)].decode("utf-8", "replace")) from None
            if not values:
                raise _not_numbers(field, "an empty entry between commas")
            yield count, values
            count, at = count + len(values), stop + 1
        if count != total:
            raise _not_numbers(field, "an empty entry between commas")

    def integers(
        self, field: str, dtype: npt.DTypeLike, *, low: int, high: int, rule: str, remedy: str
    ) -> npt.NDArray[Any]:
        """The list as an array.

        Args:
            field: its name, for error messages.
            dtype: of the result; holds low..high.
            low: smallest legal entry.
            high: largest legal entry.
            rule: what an entry must be.
            remedy: what to do when it is not.

        Raises:
            RowError: an entry is not an integer in low..high.
        """
        out = np.empty(len(self), dtype=dtype)
        for first, values in self._pieces(field):
            if not set(map(type, values)) <= {int} or min(values) < low or max(values) > high:
                bad = next(i for i, v in enumerate(values) if type(v) is not int or not low <= v <= high)
                raise RowError(f"{field}[{first + bad}]", shown(values[bad]), rule, remedy)
            out[first : first + len(values)] = values
        return out

    def reals(self, field: str) -> Reals:
        """The list as float64, null as NaN.

        Raises:
            RowError: an entry is neither a number nor null.
        """
        out = np.empty(len(self), dtype=np.float64)
        for first, values in self._pieces(field):
            kinds = set(map(type, values))
            if not kinds <= _REALS:
                bad = next(i for i, v in enumerate(values) if type(v) not in _REALS)
                raise RowError(
                    f"{field}[{first + bad}]", shown(values[bad]), "must be a number or null", "write plain numbers"
                )
            if type(None) in kinds:
                values = [np.nan if v is None else v for v in values]
            try:
                out[first : first + len(values)] = values
            except OverflowError:
                raise RowError(field, "has an integer beyond float64", "must be a number", "write it finite") from None
        return out


def _not_numbers(field: str, near: str) -> RowError:
    return RowError(field, f"holds {near[:60]!r}", "must be a flat JSON list of numbers", "write one number per token")


def _string_end(line: bytes, start: int) -> int:
    """Index after the string whose opening quote is at start."""
    at = start + 1
    while True:
        at = line.find(b'"', at)
        if at < 0:
            return len(line)
        back = at
        while line[back - 1] == ord("\\"):
            back -= 1
        at += 1
        if (at - back) % 2 == 1:
            return at


def _flat_end(line: bytes, start: int) -> int:
    """Index of the bracket that closes the list whose first entry is at start, -1 where the list is not flat."""
    end = line.find(b"]", start)
    flat = end >= 0 and all(line.find(mark, start, end) < 0 for mark in (b'"', b"[", b"{", b"}"))
    return end if flat else -1


def _cut_lists(line: bytes, whole: Container[str]) -> tuple[bytes, dict[str, NumberList]]:
    """Replace the flat lists at the top level by `[]`; see `parse_row`."""
    lists: dict[str, NumberList] = {}
    seen: set[str] = set()
    kept: list[bytes] = []
    copied = at = depth = 0
    while (mark := _STRUCTURE.search(line, at)) is not None:
        at = mark.end()
        if mark.group() in b"[{":
            depth += 1
        elif mark.group() in b"]}":
            depth -= 1
        else:
            at = _string_end(line, mark.start())
            colon = _COLON.match(line, at) if depth == 1 else None
            if colon is None:
                continue
            key = str(json.loads(line[mark.start() : at]))
            if key in seen:
                raise RowError(key, "stands twice in the row", "a field is given once", "remove one of the two")
            seen.add(key)
            end = _flat_end(line, colon.end()) if colon.group(1) and key not in whole else -1
            if end >= 0:
                lists[key] = NumberList(line, colon.end(), end)
                kept.append(line[copied : colon.end()])
                copied, at = end, end + 1
    kept.append(line[copied:])
    return b"".join(kept), lists


def parse_row(line: bytes, *, whole: Container[str] = ()) -> dict[str, Any]:
    """Split a line into its fields.

    Args:
        line: one JSON object, UTF-8.
        whole: fields that are never cut out.

    Returns:
        Every field; a `NumberList` for each flat list at the top level.

    Raises:
        RowError: the line is not a JSON object, or it repeats a field.
    """
    try:
        skeleton, lists = _cut_lists(line, whole)
        row = json.loads(skeleton.decode("utf-8"))
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        start = line[:60].decode("utf-8", "replace").strip()
        raise RowError("row", shown(start), f"is not valid JSON ({error})", "write one JSON object per line") from None
    if not isinstance(row, dict):
        raise RowError("row", shown(row), "must be a JSON object", "write one object per line")
    row.update(lists)
    return row
