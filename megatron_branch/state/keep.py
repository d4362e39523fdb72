"""Tensors kept on the device or away from it: sent out once written, fetched for a reader, sent back once changed.

Always true:
- what is kept away has a copy on the device only while it is read or on its way, and that copy is counted as `moving`;
- a device tensor that is on its way out is held until its copy is done (`Keeper.settle`), one that comes in is given
  out only after its copy was waited for;
- sums are made on the device whatever the place, in the same order, so every place gives the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.copies import Copies, HostMemory, Ticket
from megatron_branch.state.files import StateFolder
from megatron_branch.state.placement import Place, Placement, stored_bytes


class Kept(Protocol):
    """Tensors of one page that belong together: a layer's keys and values, their adjoints, or a stage input."""

    def prefetch(self) -> None:
        """Start to bring them to the device."""
        ...

    def get(self) -> tuple[Tensor, ...]:
        """The tensors on the device, once they are there; valid until `drop` or `put_back`."""
        ...

    def put_back(self) -> None:
        """What `get` gave was changed in place: keep that."""
        ...

    def drop(self) -> None:
        """What `get` or `prefetch` brought is not needed any more."""
        ...

    def free(self) -> None:
        """Forget the tensors."""
        ...


class OnDevice:
    """Kept where they are used."""

    def __init__(self, count: ByteCount, kind: str, tensors: tuple[Tensor, ...]) -> None:
        self._count, self._kind, self._tensors = count, kind, tensors
        self._size = sum(tensor.nbytes for tensor in tensors)
        count.add(kind, self._size)

    def prefetch(self) -> None:
        """They are there."""

    def get(self) -> tuple[Tensor, ...]:
        """See `Kept`."""
        return self._tensors

    def put_back(self) -> None:
        """Changed in place already."""

    def drop(self) -> None:
        """There is no copy."""

    def free(self) -> None:
        """See `Kept`."""
        self._count.add(self._kind, -self._size)
        self._tensors = ()


class Shelf(Protocol):
    """Where one `Away` keeps its tensors.

    `save` and `load` return what waits for the move; it also holds the host buffers that the move goes through.
    """

    def save(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to keep the contents of device tensors."""
        ...

    def load(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to fill device tensors with what was saved last."""
        ...

    def remove(self) -> None:
        """Forget it."""
        ...


class Away:
    """Kept on a shelf, with a copy on the device while it is needed.

    Args:
        keeper: who holds what is on its way out.
        key: kind, unit and layer.
        place, shelf: where.
        tensors: on the device; they are sent out, and must not be changed any more.
    """

    def __init__(self, keeper: Keeper, key: Key, place: Place, shelf: Shelf, tensors: tuple[Tensor, ...]) -> None:
        self._keeper, self._key, self._place, self._shelf = keeper, key, place, shelf
        self._like = tuple(tensor.to("meta") for tensor in tensors)
        self._here: tuple[Tensor, ...] | None = tensors
        self._arrive: Callable[[], None] | None = None
        self._arrived = True
        self._size = stored_bytes([tensor.nbytes for tensor in tensors], place)
        self._moving = sum(tensor.nbytes for tensor in tensors)
        keeper.count.add(key.kind, self._size, place)
        keeper.count_moving(self._moving, place)
        self.put_back()

    def prefetch(self) -> None:
        """See `Kept`."""
        if self._here is None:
            self._keeper.count_moving(self._moving, self._place)
            self._here = tuple(torch.empty_like(like, device=self._keeper.device) for like in self._like)
            self._arrive, self._arrived = self._shelf.load(self._here), False

    def get(self) -> tuple[Tensor, ...]:
        """See `Kept`."""
        self.prefetch()
        assert self._here is not None
        if not self._arrived and self._arrive is not None:
            self._arrive()
            self._arrived = True
        return self._here

    def put_back(self) -> None:
        """See `Kept`."""
        assert self._here is not None and self._arrived
        done = self._shelf.save(self._here)
        self._keeper.leaving.append(Leaving(self._key.layer, self._here, done, self._moving, self._place))
        self._here = self._arrive = None

    def drop(self) -> None:
        """See `Kept`."""
        if self._here is not None:
            self._keeper.count_moving(-self._moving, self._place)
            try:
                self.get()  # memory is not given back under a copy
            finally:
                self._here = self._arrive = None

    def free(self) -> None:
        """See `Kept`."""
        with suppress(OSError):  # of a file that a failed step asked for and nobody reads
            self.drop()
        self._shelf.remove()
        self._keeper.count.add(self._key.kind, -self._size, self._place)


class Key(NamedTuple):
    """What is kept; `layer` is 0 for a stage input."""

    kind: str
    unit: int
    layer: int


class Leaving(NamedTuple):
    """Device tensors on their way out."""

    layer: int
    tensors: tuple[Tensor, ...]
    done: Callable[[], None]
    size: int
    place: Place


@dataclass(eq=False)
class _HostShelf:
    """In host tensors of its own."""

    copies: Copies
    tensors: tuple[Tensor, ...]

    def save(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        return _wait_all(_start_all(self.copies, self.tensors, tensors))

    def load(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        return _wait_all(_start_all(self.copies, tensors, self.tensors))

    def remove(self) -> None:
        self.tensors = ()


@dataclass(eq=False)
class _FileShelf:
    """In a file, by way of host buffers; one thread reads and writes all files, one after another."""

    copies: Copies
    host: HostMemory
    folder: StateFolder
    name: str

    def save(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        buffers = tuple(self.host.empty_like(tensor) for tensor in tensors)
        tickets = _start_all(self.copies, buffers, tensors)

        def write() -> None:
            for ticket in tickets:
                ticket.finish()
            self.folder.write(self.name, buffers)

        written = self.folder.submit(write)

        def done() -> None:
            _wait_all(tickets)()
            written.result()

        return done

    def load(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        buffers = tuple(self.host.empty_like(tensor) for tensor in tensors)
        after = self.copies.mark()

        def read() -> list[Ticket]:
            self.folder.read(self.name, buffers)
            return [self.copies.start(*pair, after=after) for pair in zip(tensors, buffers, strict=True)]

        started = self.folder.submit(read)

        def arrive() -> None:
            _wait_all(started.result())()
            assert buffers  # held until the reader lets go of this function

        return arrive

    def remove(self) -> None:
        self.folder.submit(self.folder.remove, self.name)


def _start_all(copies: Copies, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Ticket]:
    after = copies.mark()
    return [copies.start(target, source, after=after) for target, source in zip(targets, sources, strict=True)]


def _wait_all(tickets: Sequence[Ticket]) -> Callable[[], None]:
    def wait() -> None:
        for ticket in tickets:
            ticket.wait()

    return wait


@dataclass(eq=False)
class Keeper:
    """Keeps tensors where the placement says.

    Attributes:
        count: where bytes are counted.
        device: where tensors are used.
        copies, host: how they move, and into which memory.
        folder: for files; made when the placement first needs it.
        placement: of what is kept from now on.
        leaving: what is on its way out, oldest first.
    """

    count: ByteCount
    device: torch.device
    copies: Copies
    host: HostMemory
    folder: StateFolder | None
    placement: Placement
    leaving: deque[Leaving]

    def keep(self, key: Key, tensors: tuple[Tensor, ...]) -> Kept:
        """Keep device tensors, which then must change only through what is returned."""
        place = self.placement.places[key.kind]
        if place == "device":
            return OnDevice(self.count, key.kind, tensors)
        if place == "host":
            shelf: Shelf = _HostShelf(self.copies, tuple(self.host.empty_like(tensor) for tensor in tensors))
        else:
            assert self.folder is not None
            shelf = _FileShelf(self.copies, self.host, self.folder, f"{key.kind}-{key.unit}-{key.layer}")
        return Away(self, key, place, shelf, tensors)

    def count_moving(self, size: int, place: Place) -> None:
        """Count device tensors on the move to or from a place; files are reached through host buffers of that size."""
        self.count.add("moving", size)
        if place == "nvme":
            self.count.add("moving", size, "host")

    def settle(self, *, but: int | None = None) -> None:
        """Wait for what is on its way out, except for a layer's own, and let go of its device tensors."""
        for _ in range(len(self.leaving)):
            left = self.leaving.popleft()
            if left.layer == but:
                self.leaving.append(left)
                continue
            self.count_moving(-left.size, left.place)
            left.done()

    def abandon(self) -> None:
        """Settle after an error: what cannot be kept any more is not wanted either."""
        while self.leaving:
            with suppress(Exception):
                self.settle()

    def close_step(self) -> None:
        """A step is over: no file of it is left when this returns."""
        if self.folder is not None:
            self.folder.clear()
