"""Files are whole or not there, and folders of dead processes, and only those, are removed."""

import errno
import multiprocessing
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_branch.state.files import StateFolder
from megatron_branch.state.placement import BLOCK

TENSORS = (torch.arange(5000, dtype=torch.bfloat16), torch.randn(7, 2, 4, dtype=torch.float64), torch.zeros(0, 2))


def test_any_size_comes_back_and_starts_at_whole_blocks(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "deep" / "root")
    folder.write("a", TENSORS)
    (path,) = folder.path.iterdir()
    assert path.stat().st_size == 3 * BLOCK + BLOCK
    read = tuple(torch.empty_like(tensor) for tensor in TENSORS)
    folder.read("a", read)
    assert all(torch.equal(one, two) for one, two in zip(TENSORS, read, strict=True))
    folder.write("a", (TENSORS[1],))  # in place of the other
    assert path.stat().st_size == BLOCK
    folder.close()
    assert list((tmp_path / "deep" / "root").iterdir()) == []


def test_a_short_write_goes_on_and_one_of_nothing_is_reported(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    whole = os.pwrite
    with patch("os.pwrite", lambda descriptor, data, start: whole(descriptor, data[:1000], start)):
        folder.write("a", TENSORS)
    read = tuple(torch.empty_like(tensor) for tensor in TENSORS)
    folder.read("a", read)
    assert torch.equal(read[0], TENSORS[0])
    with patch("os.pwrite", return_value=0), pytest.raises(OSError, match="only 0 of 10000 bytes"):
        folder.write("b", TENSORS)
    assert [path.name for path in folder.path.iterdir()] == ["a"]


def test_a_full_disk_is_reported_with_path_wanted_and_free_bytes_and_keeps_the_old_file(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write("a", (TENSORS[1],))
    with (
        patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(
            OSError, match=r"No space left on device; path .*/a, wanted 16384 bytes, free \d+ bytes"
        ) as error,
    ):
        folder.write("a", TENSORS)
    assert error.value.errno == errno.ENOSPC
    read = torch.empty_like(TENSORS[1])
    folder.read("a", (read,))
    assert torch.equal(read, TENSORS[1])


def test_what_is_not_whole_is_never_read(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write("a", TENSORS)
    os.truncate(folder.path / "a", BLOCK)
    with pytest.raises(OSError, match="4096 bytes, wanted 16384"):
        folder.read("a", TENSORS)


def _die_with_a_file(root: Path) -> None:
    folder = StateFolder(root)
    folder.write("a", TENSORS)
    os._exit(9)


def test_a_start_removes_the_folders_of_dead_processes_and_no_other(tmp_path: Path) -> None:
    living = StateFolder(tmp_path)
    living.write("a", TENSORS)
    (tmp_path / "somebody").mkdir()
    process = multiprocessing.get_context("spawn").Process(target=_die_with_a_file, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9 and len(list(tmp_path.iterdir())) == 3
    new = StateFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, new.path, tmp_path / "somebody"])
    assert (living.path / "a").exists()


def test_a_folder_that_cannot_be_used_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"state\.nvme_path = .*file/x: cannot be used"):
        StateFolder(tmp_path / "file" / "x")
