"""Whether this machine has room for the state that a run is predicted to keep away from the device."""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.outlook import fullest_rank
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.limits import Layout
from megatron_branch.rollouts.record import Rollout
from megatron_branch.state.config import StateConfig
from megatron_branch.state.copies import HostMemory
from megatron_branch.state.files import free_bytes
from megatron_branch.tracking.console import bytes_text
from megatron_branch.tree.build import build_trees

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")


def host_room(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int:
    """Bytes of host memory that may still be taken: what the kernel calls available, within the container's limit."""
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="utf-8").splitlines())
    room = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # v1
    ):
        most, now = _number(cgroups / limit), _number(cgroups / used)
        if most is not None and now is not None:
            room = min(room, max(most - now, 0))
    return room


def room_of_each_rank(config: StateConfig) -> int | None:
    """What a rank may take of the host's memory, an equal share (collective); None where no choice depends on it.

    Only `auto` with files chooses by it; other placements are checked before the run.
    """
    if config.placement != "auto" or config.nvme_path is None:
        return None
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return host_room() // hosts.count(socket.gethostname())


def check_room(
    config: Config,
    arch: Architecture,
    steps: Sequence[list[Rollout]],
    *,
    device: str,
    world_size: int,
    ranks_here: int,
) -> None:
    """Predict the bytes of the step with the longest rollout and compare them with what this machine has.

    Args:
        config, arch: the run.
        steps: the rollouts of all steps.
        device: its type.
        world_size: all ranks; `ranks_here` of them share this machine.

    Raises:
        ValueError: they do not fit; the message has the numbers.
    """
    if config.state.placement == "device":
        return
    rollouts = max(steps, key=lambda step: max(len(rollout.token_ids) for rollout in step))
    sizes = config.parallel
    dp = sizes.data_parallel(world_size)
    plan = make_plan(
        build_trees(rollouts, share=config.branch.gradient != "dense"),
        rollouts,
        config=config.branch,
        layout=Layout(dp, sizes.cp, sizes.pp, config.zero.matched(dp)),
        aggregation=config.objective.aggregation,
        shape=arch.shape(),
        sizes=[stage.activations for stage in stage_sizes(config, arch, device=device)],
    )
    room = host_room()
    asked = room // ranks_here if config.state.nvme_path is not None else None
    peak = fullest_rank(config, arch, plan, device=device, host_room_bytes=asked).count.peak_at
    refuse_without_room(
        config, host_bytes=peak["host"] * ranks_here, host_free=room, file_bytes=peak["nvme"] * ranks_here
    )
    if device == "cuda":
        check_pinned(peak["host"], HostMemory(pin=True))


def refuse_without_room(config: Config, *, host_bytes: int, host_free: int, file_bytes: int) -> None:
    """Raise ValueError when the ranks of this machine need more memory or disk than is free."""
    state = config.state
    if host_bytes > host_free:
        raise ValueError(
            f"state.placement={state.placement}: the ranks of this machine would keep {bytes_text(host_bytes)} "
            f"({host_bytes} bytes) of state in host memory, and {bytes_text(host_free)} ({host_free} bytes) are free; "
            "set state.placement=nvme, raise parallel.cp, or run on more machines"
        )
    if not file_bytes:
        return
    assert state.nvme_path is not None
    existing = next(folder for folder in (state.nvme_path, *state.nvme_path.absolute().parents) if folder.exists())
    free = free_bytes(existing)
    if file_bytes > free:
        raise ValueError(
            f"state.placement={state.placement}: the ranks of this machine would keep {bytes_text(file_bytes)} "
            f"({file_bytes} bytes) of state in files under state.nvme_path={state.nvme_path}, and {bytes_text(free)} "
            f"({free} bytes) are free; free the disk, name another one, raise parallel.cp, or run on more machines"
        )


def check_pinned(wanted: int, memory: HostMemory) -> None:
    """Raise ValueError when more is to be page-locked than the process's limit, and the limit holds.

    On many systems the driver locks memory past RLIMIT_MEMLOCK, so one request beyond it is tried.

    Args:
        wanted: bytes to page-lock.
        memory: where to try.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return
    memory.empty_like(torch.empty(limit + 1, dtype=torch.uint8, device="meta"))
    if not memory.pinned:
        raise ValueError(
            f"the state of one rank would page-lock {bytes_text(wanted)} ({wanted} bytes) of host memory, and "
            f"RLIMIT_MEMLOCK allows {limit} bytes; raise it (ulimit -l, or memlock in the container's settings)"
        )


def _number(path: Path) -> int | None:
    """A file's number; None where it does not exist or sets no limit (`max`)."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
