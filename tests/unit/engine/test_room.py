"""What the machine has no room for is refused with the numbers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_branch.config import Config, make_config
from megatron_branch.engine.room import check_pinned, host_room, refuse_without_room
from megatron_branch.state.copies import HostMemory


def config(**state: Any) -> Config:
    return make_config({"model": {"path": "m"}, "data": {"rollouts": "r"}, "state": state})


def test_room_is_what_the_kernel_and_the_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    assert host_room(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert host_room(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("4005\n")
    assert host_room(meminfo, tmp_path) == 4000
    assert host_room() > 0


def test_too_little_memory_or_disk_is_refused_with_the_numbers(tmp_path: Path) -> None:
    refuse_without_room(config(placement="host"), host_bytes=10, host_free=10, file_bytes=0)
    with pytest.raises(ValueError, match=r"state\.placement=host: .*\(11 bytes\).*\(10 bytes\) are free; set"):
        refuse_without_room(config(placement="host"), host_bytes=11, host_free=10, file_bytes=0)
    on_disk = config(placement="nvme", nvme_path=str(tmp_path / "not" / "there"))
    refuse_without_room(on_disk, host_bytes=0, host_free=10, file_bytes=1)
    with pytest.raises(
        ValueError, match=rf"\({1 << 60} bytes\) of state in files under state\.nvme_path=.*free the disk"
    ):
        refuse_without_room(on_disk, host_bytes=0, host_free=10, file_bytes=1 << 60)


@pytest.mark.parametrize("granted", [True, False])
def test_page_locking_past_the_limit_is_refused_only_where_the_limit_holds(granted: bool) -> None:
    def empty_like(self: HostMemory, tensor: Any) -> None:
        assert tensor.nbytes == 64 * 1024 + 1
        self.pinned = granted

    memory = HostMemory(pin=True)
    limits = (64 * 1024, 64 * 1024)
    with patch.object(resource, "getrlimit", return_value=limits), patch.object(HostMemory, "empty_like", empty_like):
        check_pinned(64 * 1024, memory)
        if granted:
            check_pinned(10**9, memory)
        else:
            with pytest.raises(ValueError, match=r"1000000000 bytes.*RLIMIT_MEMLOCK allows 65536 bytes; raise it"):
                check_pinned(10**9, memory)
