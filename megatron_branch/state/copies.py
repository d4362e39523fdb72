"""Copies between device and host memory, with their order made explicit.

A copy is ordered by three edges, and nothing else may be assumed of it:

- it starts after the work that `mark` stood for: the writer of its source, and earlier users of its target;
- copies run one after another in the order in which they were started, whichever way they go;
- only after `Ticket.wait` may device work read the target, and either end be written or let go.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order all later device work after the copy."""
        ...

    def finish(self) -> None:
        """Block this thread until the copy is done, as reading the target on the host needs."""
        ...


class Copies(Protocol):
    """One queue of copies."""

    def mark(self) -> Any:
        """A point after all device work so far; taken in the thread that computes."""
        ...

    def start(self, target: Tensor, source: Tensor, *, after: Any) -> Ticket:
        """Copy once the work before the mark `after` is done. May be called from another thread."""
        ...


class _Done:
    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectCopies:
    """For a device that is the CPU itself: done when started."""

    def mark(self) -> None:
        """Nothing is ever under way."""

    def start(self, target: Tensor, source: Tensor, *, after: Any) -> Ticket:
        """See `Copies`."""
        target.copy_(source)
        return _Done()


class _Event:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def finish(self) -> None:
        self._done.synchronize()


class StreamCopies:
    """On a CUDA stream of its own, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event in the computing stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def start(self, target: Tensor, source: Tensor, *, after: torch.cuda.Event) -> Ticket:
        """See `Copies`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Event(done)


class HostMemory:
    """Host tensors, page-locked while the system grants it.

    Args:
        pin: ask for page-locked memory; without effect on a CPU, so not asked for there.
    """

    def __init__(self, *, pin: bool) -> None:
        self.pinned = pin

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised contiguous host tensor of a tensor's shape and dtype."""
        if self.pinned:
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                warnings.warn(
                    f"page-locked memory was refused ({str(error).splitlines()[0]}); the state of prefixes is kept in "
                    "pageable host memory from here on, and its copies no longer overlap with computing; "
                    "raise the limit (ulimit -l) to pin it",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def copies_for(device: torch.device) -> Copies:
    """The copies of a device."""
    return DirectCopies() if device.type == "cpu" else StreamCopies(device)
