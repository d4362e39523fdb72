"""Metrics as JSON lines: one row per optimizer step, readable while the run goes on and after it broke."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_branch.tracking.metrics import STEP_KEY


class JsonlSink:
    """Appends rows to a file.

    A run that continues at `first_step` keeps the rows before it. Rows from `first_step` on belong to steps that are
    taken again: the file that holds them is kept as `FILE.replaced`.
    """

    def __init__(self, path: Path, *, first_step: int = 1) -> None:
        """Open `path` for appending.

        Raises:
            ValueError: the file cannot be created or read.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _keep_rows_before(path, first_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"tracking.run_dir = {path.parent}: {path.name} cannot be written: {error.strerror}; "
                "choose a folder that this process may write to"
            ) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row to the system. What is not finite becomes null, as JSON has no such numbers.

        Raises:
            OSError: the row could not be written (disk full), with the file and the step.
        """
        row = {STEP_KEY: step, **{key: value if math.isfinite(value) else None for key, value in metrics.items()}}
        try:
            line = json.dumps(row).encode() + b"\n"
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(
                error.errno,
                f"metrics of step {step} cannot be written: {error.strerror}; free space there",
                str(self._path),
            ) from None

    def close(self, exit_code: int = 0) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a last line that a crash cut short is left out."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _keep_rows_before(path: Path, first_step: int) -> None:
    rows = read_metrics(path)
    kept = [row for row in rows if row[STEP_KEY] < first_step]
    ends_whole = path.stat().st_size == 0 or path.read_bytes().endswith(b"\n")
    if len(kept) == len(rows) and ends_whole:
        return
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(path, path.with_name(path.name + ".replaced"))
    os.replace(fresh, path)
