"""Copies that run as late as their contract allows: a missing wait, or memory given back too early, shows."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class DelayedCopy:
    """A copy of `DelayedCopies`; it holds no memory, so that who started it must."""

    queue: DelayedCopies
    target: weakref.ref[Tensor]
    source: weakref.ref[Tensor]
    done: bool = False

    def wait(self) -> None:
        """Run all copies up to this one."""
        self.queue.run_to(self)

    def finish(self) -> None:
        """The same: the double knows one clock."""
        self.queue.run_to(self)


@dataclass(eq=False)
class DelayedCopies:
    """Each copy runs when the next one is started, or when it is waited for.

    Attributes:
        lost: copies whose memory was gone when they ran.
    """

    lost: int = 0
    _pending: deque[DelayedCopy] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self) -> None:
        """All device work is done when it is called."""

    def start(self, target: Tensor, source: Tensor, *, after: Any) -> DelayedCopy:
        """See `Copies`."""
        copy = DelayedCopy(self, weakref.ref(target), weakref.ref(source))
        with self._lock:
            while self._pending:
                self._run(self._pending.popleft())
            self._pending.append(copy)
        return copy

    def run_to(self, copy: DelayedCopy) -> None:
        """Run the pending copies up to and with one."""
        with self._lock:
            while not copy.done:
                self._run(self._pending.popleft())

    def _run(self, copy: DelayedCopy) -> None:
        target, source = copy.target(), copy.source()
        copy.done = True
        if target is None or source is None:
            self.lost += 1
        else:
            target.copy_(source)
