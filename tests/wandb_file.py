"""Reads the file of an offline W&B run: W&B ships no reader, and only the file proves what was logged."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768
_FULL, _LAST = 1, 4


def run_records(run_dir: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of the one offline run under `run_dir`, in order.

    The file is a LevelDB log: blocks of 32 KiB, in them parts with a header (checksum, length, kind).
    """
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    at, record = len(b":W&B") + 3, b""
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def history_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The logged rows of that run."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in run_records(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]
