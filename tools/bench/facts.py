"""What a benchmark result must say about where it comes from: commit, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers", "numpy")


def provenance() -> dict[str, Any]:
    """`commit` (with `+changes` where the working tree differs), `versions`, `machine`."""
    return {"commit": _commit(), "versions": _versions(), "machine": _machine()}


def _commit() -> str:
    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores, {model}"
