"""Read a file of rollouts, row by row.

Always true:
- rows come in file order, and one row is held at a time;
- an error says `file:line: field value: rule; remedy`;
- a row that is skipped is counted, and stands in `FILE.rejected.jsonl` with the reason once the file has been read;
- a file gives at least one rollout, and no two with the same id.
"""

from __future__ import annotations

import gzip
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from megatron_branch.rollouts.columns import RowError, parse_row, shown
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.row import PROVENANCE_FIELDS, rollout_from_row

OnBadRow = Literal["error", "skip"]
_BUFFER_BYTES = 1 << 20


class RolloutReader(Iterator[Rollout]):
    """An iterator over the rollouts of a file.

    Attributes:
        path: the JSONL file; gzip where the name ends in `.gz`.
        skipped: number of rows rejected so far.
        rejected_path: where rejected rows go, with `on_bad_row="skip"`.
    """

    def __init__(self, path: Path, *, on_bad_row: OnBadRow = "error", vocab_size: int | None = None) -> None:
        self.path = path
        self.skipped = 0
        self.rejected_path = path.with_name(path.name + ".rejected.jsonl")
        self._on_bad_row = on_bad_row
        self._vocab_size = vocab_size
        self._lines_by_id: dict[str, int] = {}
        self._rejects = _Rejects(self.rejected_path)
        self._rows = self._read()

    def __next__(self) -> Rollout:
        return next(self._rows)

    def _read(self) -> Iterator[Rollout]:
        try:
            for number, line in self._lines():
                if not line.strip():
                    continue
                try:
                    rollout = self._rollout(line, number)
                except RowError as error:
                    if self._on_bad_row == "error":
                        raise ValueError(f"{self.path}:{number}: {error}") from None
                    self.skipped += 1
                    self._rejects.add(number, line, str(error))
                    continue
                yield rollout
            self._rejects.publish()
        finally:
            self._rejects.discard()
        if not self._lines_by_id:
            what = f"all {self.skipped} rows were rejected" if self.skipped else "it is empty"
            raise ValueError(f"{self.path}: no rollouts, {what}; write one JSON object per line, one line per rollout")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered lines; what is wrong with the file itself becomes a ValueError."""
        number = 0
        try:
            with _open(self.path) as file:
                for number, line in enumerate(file, start=1):
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            remedy = "name a readable JSONL file, gzipped if and only if its name ends in .gz"
            where = f"{self.path}:{number + 1}" if number else str(self.path)
            raise ValueError(f"{where}: cannot be read ({reason}); {remedy}") from error

    def _rollout(self, line: bytes, number: int) -> Rollout:
        row = parse_row(line, whole=PROVENANCE_FIELDS)
        rollout = rollout_from_row(row, source=f"{self.path}:{number}", vocab_size=self._vocab_size)
        earlier = self._lines_by_id.setdefault(rollout.rollout_id, number)
        if earlier != number:
            rule = f"must be unique, line {earlier} has it too"
            raise RowError("rollout_id", shown(rollout.rollout_id), rule, "rename one, or leave the field out")
        return rollout


class _Rejects:
    """A file that appears under its name when it is complete, and only when something was added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def add(self, number: int, line: bytes, error: str) -> None:
        if self._file is None:
            self._file = self._create()
        row = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
        json.dump({"line": number, "error": error, "row": row}, self._file)
        self._file.write("\n")

    def _create(self) -> IO[str]:
        # Every rank may read the same file at the same time: a name of its own, and a whole file moved into place.
        path = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}.tmp")
        try:
            return open(path, "x", encoding="utf-8")
        except OSError as error:
            remedy = "make its folder writable, or set data.on_bad_row to error"
            raise ValueError(f"{self._path}: rejected rows cannot be written ({error.strerror}); {remedy}") from error

    def publish(self) -> None:
        if self._file is not None:
            self._file.close()
            os.replace(self._file.name, self._path)
            self._file = None

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self._file.name)
            self._file = None


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return open(path, "rb", buffering=_BUFFER_BYTES)


def read_rollouts(path: str | Path, *, on_bad_row: OnBadRow = "error", vocab_size: int | None = None) -> RolloutReader:
    """Iterate over the rollouts of a file, in file order.

    Args:
        path: JSONL, gzip where the name ends in `.gz`.
        on_bad_row: `error` stops at the first bad row, `skip` counts it and writes it to `PATH.rejected.jsonl`.
        vocab_size: number of token ids that the model knows; None leaves the upper end unchecked.

    Returns:
        An iterator whose `skipped` counts the rejected rows.

    Raises:
        ValueError: (while iterating) the file cannot be read, holds no rollout, or has a bad row.
    """
    return RolloutReader(Path(path), on_bad_row=on_bad_row, vocab_size=vocab_size)
