"""The machine that this process runs on as `Hardware`, measured in about a second with numpy.

Always true:
- nothing is left behind: the file that is written is removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_branch.plan.hardware import THIS_MACHINE, Hardware

_SIDE = 1024
_COPY_BYTES = 64 * 2**20


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some runs, after one that warms up."""
    work()
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _write_seconds(folder: Path, block: bytes) -> float:
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def measure_this_machine(ranks: int, folder: Path) -> Hardware:
    """One of `ranks` equal shares of this machine: its memory is "device" memory, since ranks run on the CPU.

    Host memory is what is left of the machine's, so 0: a copy to it would free nothing.

    Args:
        ranks: processes that will share the machine.
        folder: on the disk that state may go to.
    """
    left = np.ones((_SIDE, _SIDE), dtype=np.float32)
    gemm = 2 * _SIDE**3 / _seconds(lambda: left @ left)
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    copy = _COPY_BYTES / _seconds(lambda: np.copyto(target, source))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Hardware(
        name=THIS_MACHINE,
        memory_bytes=memory // ranks,
        flops=gemm / ranks,
        memory_rate=copy / ranks,
        link_rate=copy / ranks,
        host_rate=copy / ranks,
        host_bytes=0,
        disk_bytes=shutil.disk_usage(folder).free // ranks,
        disk_rate=_COPY_BYTES / _write_seconds(folder, source.tobytes()) / ranks,
        per_machine=ranks,
    )
