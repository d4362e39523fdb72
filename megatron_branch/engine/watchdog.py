"""Ends a whole job, with one message, when one of its ranks fails, dies or hangs; and hears when it is to stop.

A thread of every rank looks, twice a second, at a key-value store that all ranks share, and says there where its rank
is. It works while the rank's main thread waits in a collective, which no exception and no signal handler interrupts.

Always true:
- the first rank that finds something wrong claims the one message of the job; all others end without a word;
- a rank that waits for others is no fault: only when no rank of the job gets on for `timeout_s` does it hang;
- a request to stop that reached one rank reaches all, and none acts on it before all agree (see `Trainer.train`).
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch.distributed as dist

TICK_S = 0.5
GRACE_S = 2.0  # for a main thread that is already on its way out, so that W&B is told
VERDICT_S = 6.0  # within it the rank that ended first is known, if it is one of this machine
LAUNCHERS = {"deepspeed.launcher.launch", "torchrun", "torch.distributed.run"}
REFUSAL_S = 2.0  # what every rank refuses is rank 0's to say
# What a rank says that only lost another one: NCCL's and gloo's words.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        machine: of its process ids.
        pid: its process.
        marks: how often it got on; negative once it has ended well.
        place: what it is doing.
        line: of code that its main thread is in.
        waits: that is a collective.
    """

    machine: str
    pid: int
    marks: int
    place: str
    line: str
    waits: bool

    def ended_unseen(self, machine: str) -> bool:
        """Its process is gone, and it did not end well; always False for another machine's."""
        if self.machine != machine or self.marks < 0:
            return False
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True


def shared_store(address: str) -> dist.Store:
    """A store of all ranks with a connection of its own per rank (collective).

    Args:
        address: a name of rank 0's machine that all others reach.
    """
    if dist.get_rank() == 0:
        served = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        served.set("first", "")
        served.set("stop", "")
        for rank in range(dist.get_world_size()):
            served.set(f"beat/{rank}", "")
        dist.broadcast_object_list([served.port])
        return served
    port: list[Any] = [None]
    dist.broadcast_object_list(port)
    return dist.TCPStore(address, port[0], is_master=False, wait_for_workers=False)


class Watchdog:
    """This rank's thread; `with` starts and ends it.

    Args:
        store: of all ranks, see `shared_store`.
        rank: own.
        world_size: ranks of the job.
        timeout_s: seconds without any rank getting on that end the job.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._machine = _machine()
        self._launcher = _launcher()
        self._marks, self._place = 0, "start"
        self._said: str | None = None
        self._beats: dict[int, Beat] = {}
        self._moved: dict[int, float] = {}
        self._over = threading.Event()
        self._spoken = False
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # A handler in Python would run only once the main thread leaves the collective it waits in; what the
        # interpreter writes to this socket is read at once.
        self._signals, written = socket.socketpair()
        written.setblocking(False)
        self._written = written
        self._before = [(number, signal.signal(number, _noted)) for number in STOP_SIGNALS]
        self._wakeup = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        self._say()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return  # it goes on watching: the others' end, and this one's own
        self._over.set()
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before:
            signal.signal(number, handler)
        self._signals.close()
        self._written.close()
        self._marks, self._place = -1, "done"
        self._say()

    def at(self, place: str) -> None:
        """This rank got on, and is at `place` now."""
        self._place = place
        self._marks += 1

    @property
    def place(self) -> str:
        """Where this rank is."""
        return self._place

    @property
    def stop_wanted(self) -> bool:
        """A signal asked some rank, or the launcher's end asked all, to stop; not yet agreed upon."""
        return self._stop.is_set()

    def claim(self, message: str) -> bool:
        """Whether this rank is the first of the job that has something to say; then all others end.

        The message is on standard error when this returns True. A rank that gets False should end without a word.
        """
        try:
            first = self._store.compare_set("first", "", str(self._rank)) == str(self._rank).encode()
        except RuntimeError:  # the store went with rank 0
            first = self._rank == self._next_speaker()
        if first and not self._spoken:
            self._spoken = True
            print(f"train.py: {message}", file=sys.stderr, flush=True)
            return True
        return False

    def report(self, error: Exception) -> None:
        """Say what this rank failed with, its place first, then the traceback; nothing where another was first.

        Of what a user can change (ValueError) there is no traceback.
        """
        refused = isinstance(error, ValueError)
        own = "" if refused and self._rank == 0 else f"rank {self._rank}: "
        text = str(error) if refused or hasattr(error, "place") else f"{self._place}: {type(error).__name__}: {error}"
        if any(words in text for words in LOST_PEER):
            time.sleep(VERDICT_S)  # the thread ends this process once it knows which rank that was
            text = f"{getattr(error, 'place', self._place)}: another rank ended first, and nobody could say why"
        elif refused and self._rank != 0:
            time.sleep(REFUSAL_S)
        if self.claim(own + text):
            if not refused:
                traceback.print_exception(error)
            time.sleep(2 * TICK_S)  # the others hear of the claim from the store, which rank 0 serves

    def _watch(self) -> None:
        while not self._over.is_set():
            if select.select([self._signals], [], [], TICK_S)[0]:
                self._signals.recv(64)
                self._stop.set()
            if not self._launcher_lives():
                self._stop.set()
            try:
                fault = self._look()
            except RuntimeError:
                fault = self._without_store()
            if fault is not None and not self._over.is_set():
                self._end(fault)

    def _look(self) -> str | None:
        """Exchange news; what is wrong with the job, empty if another rank says it."""
        self._say()
        if self._stop.is_set():
            self._store.set("stop", "1")
        ranks = range(self._world_size)
        first, stop, *beats = self._store.multi_get(["first", "stop", *(f"beat/{rank}" for rank in ranks)])
        if stop:
            self._stop.set()
        now = time.monotonic()
        for rank, said in zip(ranks, beats, strict=True):
            if said:
                beat, known = Beat(*json.loads(said)), self._beats.get(rank)
                if known is None or known.marks != beat.marks:
                    self._moved[rank] = now
                self._beats[rank] = beat
        if first:
            return ""
        return self._death() or self._hang(now)

    def _say(self) -> None:
        line, waits = _where(self._main)
        beat = json.dumps([self._machine, os.getpid(), self._marks, self._place, line, waits])
        if beat != self._said:
            self._store.set(f"beat/{self._rank}", beat)
            self._said = beat

    def _death(self) -> str | None:
        for rank, beat in self._beats.items():
            if rank != self._rank and beat.ended_unseen(self._machine):
                return (
                    f"rank {rank}: {beat.place}: its process {beat.pid} has ended without a word (killed by a signal, "
                    "for example for memory); the job ends"
                )
        return None

    def _hang(self, now: float) -> str | None:
        """The rank that all wait for: one that is in no collective, of those the one that got on longest ago."""
        running = [rank for rank, beat in self._beats.items() if beat.marks >= 0]
        if not running or now - max(self._moved[rank] for rank in running) < self._timeout_s:
            return None
        behind = min(running, key=lambda rank: (self._beats[rank].waits, self._moved[rank]))
        beat = self._beats[behind]
        return (
            f"rank {behind}: {beat.place}: hangs: no rank has got on for {self._timeout_s:g} s (timeout_s), and this "
            f"one is behind, at {beat.line}; the job ends. If that is work, raise timeout_s"
        )

    def _without_store(self) -> str:
        """The store lives in rank 0."""
        time.sleep(TICK_S)
        if self._over.is_set() or self._rank != self._next_speaker():
            return ""
        place = self._beats[0].place if 0 in self._beats else "start"
        return self._death() or f"rank 0: {place}: is out of reach: it or its machine has ended; the job ends"

    def _next_speaker(self) -> int:
        """Who speaks when rank 0 is gone: the first rank of its machine, else of each machine."""
        here = [rank for rank, beat in self._beats.items() if beat.machine == self._machine]
        return min((r for r in here if r > 0 and not self._beats[r].ended_unseen(self._machine)), default=self._rank)

    def _end(self, fault: str) -> None:
        """End this process, whatever its main thread does."""
        if fault:
            self.claim(fault)
        self._over.wait(GRACE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _launcher_lives(self) -> bool:
        return all(process.is_running() for process in self._launcher) and (
            not self._launcher or os.getppid() == self._launcher[0].pid
        )


def _noted(number: int, frame: FrameType | None) -> None:
    """The watching thread has been told by the interpreter."""


def _machine() -> str:
    """Whose process ids a rank's process id is one of."""
    space = Path("/proc/self/ns/pid")
    return f"{platform.node()} {os.readlink(space) if space.is_symlink() else ''}"


def _launcher() -> Sequence[psutil.Process]:
    """The processes whose end is a request to stop: the parent, and `deepspeed` where it started that parent.

    On one machine a signal to `deepspeed` ends it alone; its child, which starts the ranks, goes on.
    """
    found: list[psutil.Process] = []
    try:
        parent = psutil.Process(os.getppid())
        if not LAUNCHERS.isdisjoint(Path(word).name for word in parent.cmdline()):
            found.append(parent)  # and no shell, which may end before what it started
            above = parent.parent()
            if above is not None and any(Path(word).name == "deepspeed" for word in above.cmdline()):
                found.append(above)
    except psutil.Error:
        return []
    return found


def _where(thread: int | None) -> tuple[str, bool]:
    """Line of code that a thread is in, and whether it waits there for another rank."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "", False
    inside = Path("torch", "distributed").as_posix()
    waits = f"/{inside}/" in frame.f_code.co_filename
    while frame.f_back is not None and f"/{inside}/" in frame.f_code.co_filename:
        frame = frame.f_back
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})", waits
