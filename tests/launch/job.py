"""Runs a training through the deepspeed launcher, as a user does, and sees what is left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Attributes:
        code: its exit code; None if it had to be killed.
        out, err: what it said.
        seconds: how long it took.
        left_behind: processes of its group that were there 10 s after it had ended.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    left_behind: list[str]


class RunningJob:
    """A job under way."""

    def __init__(self, process: subprocess.Popen[str], out: IO[str], err: IO[str]) -> None:
        self._process, self._out, self._err = process, out, err
        self._start = time.monotonic()

    def out(self) -> str:
        """What it has said by now."""
        return Path(self._out.name).read_text()

    def ranks(self) -> dict[int, int]:
        """Process id of each rank that runs."""
        found = {}
        for pid, words in _group(self._process.pid):
            local = [word for word in words if word.startswith("--local_rank=")]
            if local:
                found[int(local[0].partition("=")[2])] = pid
        return found

    def wait_for(self, text: str, *, limit_s: float) -> None:
        """Wait until it has said something on standard output."""
        end = time.monotonic() + limit_s
        while text not in self.out():
            assert self._process.poll() is None, f"ended before {text!r}:\n{Path(self._err.name).read_text()}"
            assert time.monotonic() < end, f"no {text!r} within {limit_s} s:\n{self.out()}"
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Signal the launcher that was started, and nothing else."""
        self._process.send_signal(number)

    def wait_code(self, *, limit_s: float) -> int:
        """Exit code of the launcher; what it started may still run."""
        return self._process.wait(limit_s)

    def wait(self, *, limit_s: float) -> Job:
        """Wait until it ends."""
        code = None
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        end = time.monotonic() + 10
        while _group(self._process.pid) and time.monotonic() < end:
            time.sleep(0.1)
        left = [" ".join(words) for _, words in _group(self._process.pid)]
        err = Path(self._err.name).read_text()
        return Job(code, self.out(), err, time.monotonic() - self._start, left)


@contextmanager
def start_job(script: Path, *arguments: str, ranks: int, folder: Path) -> Iterator[RunningJob]:
    """Launch a script with `deepspeed`, in a process group of its own that is killed at the end."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), "--num_accelerators", str(ranks), "--master_port", str(_free_port()), str(script)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{launcher.parent}{os.pathsep}{environment['PATH']}"
    with (folder / "job.out").open("w") as out, (folder / "job.err").open("w") as err:
        process = subprocess.Popen(
            [*command, *arguments], stdout=out, stderr=err, text=True, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            yield RunningJob(process, out, err)
        finally:
            if _group(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_job(config: Path, *arguments: str, ranks: int = 2, limit_s: float = 120) -> Job:
    """Train to the end."""
    script = ROOT / "launch" / "train.py"
    with start_job(script, "--config", str(config), *arguments, ranks=ranks, folder=config.parent) as job:
        return job.wait(limit_s=limit_s)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _group(group: int) -> list[tuple[int, list[str]]]:
    """Process ids and command lines of a process group, the dead that nobody has waited for left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(") ")[2].split()
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(after_name[2]) == group and after_name[0] not in "ZX":
            found.append((int(folder.name), words))
    return found
