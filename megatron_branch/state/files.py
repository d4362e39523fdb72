"""State in files: a folder per process, removed by it, or by the next process if it could not.

Always true:
- a file under its own name is whole: it is written under a temporary name, and renamed when complete;
- a folder is locked (flock) while its process lives; a start removes the folders beside its own that are not, and no
  other;
- tensors start at multiples of 4096 bytes, and a file's size is one.

Plain reads and writes, not DeepSpeed's AIO operator: it does not look at the results of its requests (DeepSpeed 0.19,
`csrc/aio/common/deepspeed_aio_common.cpp`). Of 64 MiB past a limit of 1 MiB on the size of files it reports a whole
write and leaves 1 MiB; a full disk or a bad block would become a wrong gradient.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_branch.state.placement import stored_bytes

_PREFIX = "megatron_branch_state-"


class StateFolder:
    """The files of one process, read and written by one thread in the order of the requests.

    Attributes:
        path: the process's own folder.
        close: removes it; called at the latest when the process ends.

    Args:
        root: `state.nvme_path`; made if it does not exist.

    Raises:
        ValueError: the folder cannot be made, written or locked.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root):
                remove_leftovers(root)
                self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
                self._lock = _try_lock(self.path)
        except OSError as error:
            raise ValueError(
                f"state.nvme_path = {root}: cannot be used ({error.strerror}); name a folder on a local disk that can "
                "be written"
            ) from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-files")
        self.close = weakref.finalize(self, _close, self.path, self._lock, os.getpid())

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a task in the thread after all earlier ones."""
        return self._thread.submit(task, *arguments)

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Write contiguous host tensors, in place of an earlier file of the name.

        Raises:
            OSError: the file cannot be written whole; the message has its path, the bytes wanted and those free.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        partial = self.path / f"{name}.partial"
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for tensor, start in zip(tensors, _starts(sizes), strict=True):
                    _write_all(descriptor, _bytes(tensor), start)
                os.ftruncate(descriptor, stored_bytes(sizes, "nvme"))
            finally:
                os.close(descriptor)
            os.replace(partial, self.path / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"state of a prefix cannot be written: {error.strerror or error}; path {self.path / name}, wanted "
                f"{stored_bytes(sizes, 'nvme')} bytes, free {free_bytes(self.path)} bytes; free the disk, lift the "
                "limit on file sizes, or set state.nvme_path to another one",
            ) from None

    def read(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous host tensors with what was written under a name.

        Raises:
            OSError: the file is not there or not whole.
        """
        path = self.path / name
        sizes = [tensor.nbytes for tensor in tensors]
        wanted = stored_bytes(sizes, "nvme")
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor).st_size
            if found != wanted:
                raise OSError(f"state of a prefix cannot be read: {path} has {found} bytes, wanted {wanted}")
            for tensor, start in zip(tensors, _starts(sizes), strict=True):
                _read_all(descriptor, _bytes(tensor), start, path)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; none is there if writing it failed."""
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Wait until all tasks are done and remove what a failed one left."""
        self.submit(lambda: None).result()
        for path in self.path.iterdir():
            path.unlink()


def remove_leftovers(root: Path) -> None:
    """Remove the folders under `root` whose processes are gone."""
    for folder in root.glob(f"{_PREFIX}*"):
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def free_bytes(folder: Path) -> int:
    """What may still be written on a folder's disk."""
    return shutil.disk_usage(folder).free


def _close(path: Path, lock: int | None, process: int) -> None:
    if os.getpid() == process:  # not in a process forked from it
        shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else looks for leftovers meanwhile: a folder exists for a moment before it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds a folder's lock until it is closed, or None where another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, PermissionError):  # gone, or another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _starts(sizes: Sequence[int]) -> list[int]:
    return [stored_bytes(sizes[:place], "nvme") for place in range(len(sizes))]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    written = 0
    while written < len(data):
        count = os.pwrite(descriptor, data[written:], start + written)
        if count == 0:
            raise OSError(f"only {written} of {len(data)} bytes were taken")
        written += count


def _read_all(descriptor: int, data: memoryview, start: int, path: Path) -> None:
    taken = 0
    while taken < len(data):
        count = os.preadv(descriptor, [data[taken:]], start + taken)
        if count == 0:
            raise OSError(f"state of a prefix cannot be read: {path} ends after {start + taken} bytes")
        taken += count
