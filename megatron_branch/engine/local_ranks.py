"""Run a function on several ranks of one machine: spawned processes, gloo, a file as rendezvous, no GPU.

Torch is imported by the ranks only, after their thread count is set. Used by tools and tests; training is launched by
DeepSpeed's launcher.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_branch.engine.quiet import silence_missing_accelerators


class LocalRanksError(RuntimeError):
    """The first rank that failed, with its own traceback as the report."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"rank {rank} failed first:\n{report}")
        self.rank = rank
        self.report = report


def run_local_ranks(
    world: int, fn: Callable[..., Any] | str, *args: Any, timeout_s: float = 60.0, start_method: str = "spawn"
) -> list[Any]:
    """Call `fn(*args)` on `world` fresh processes that share a gloo process group.

    `fn` must be a module-level function, or `module:name` of one that this process need not import; it finds its rank
    with `torch.distributed.get_rank()`. A world of one rank gets the machine's threads, ranks of a larger one get one
    thread each.

    Args:
        timeout_s: of the whole call.
        start_method: multiprocessing's; `forkserver` saves the imports of its preloaded modules.

    Returns:
        what `fn` returned on each rank, by rank (it must pickle).

    Raises:
        LocalRanksError: a rank raised or died; the others are killed at once.
        TimeoutError: some rank was not done after `timeout_s`; each rank has then printed its stack, and all are
            killed.
    """
    context: Any = multiprocessing.get_context(start_method)
    deadline = time.time() + timeout_s
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as scratch:
        meeting = str(Path(scratch) / "rendezvous")
        readers: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(rank, world, meeting, payload, writer, deadline), daemon=True
                )
                process.start()
                writer.close()  # the rank's end is now the only one: its death reads as end of file
                readers.append(reader)
                processes.append(process)
            return _collect(readers, processes, deadline, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader in readers:
                reader.close()


def _collect(readers: list[Connection], processes: list[BaseProcess], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = {id(reader): rank for rank, reader in enumerate(readers) if rank not in results}
        waiting = [readers[rank] for rank in pending.values()]
        ready = wait(waiting, timeout=max(0.0, deadline - time.time()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} of {len(readers)} not done after {timeout_s} s")
        for connection in ready:
            rank = pending[id(connection)]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                report = f"died with exit code {processes[rank].exitcode} and no traceback"
                raise LocalRanksError(rank, report) from None
            if not succeeded:
                raise LocalRanksError(rank, value)
            results[rank] = value
    for process in processes:
        process.join(max(0.0, deadline - time.time()))
    return [results[rank] for rank in range(len(readers))]


def _rank_main(rank: int, world: int, meeting: str, payload: bytes, writer: Connection, deadline: float) -> None:
    if world > 1:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world)
    left_s = max(deadline - time.time(), 1.0)
    faulthandler.dump_traceback_later(max(left_s - 3.0, 0.5))
    try:
        import torch
        import torch.distributed as dist

        if world > 1:
            torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=left_s)
        )
        silence_missing_accelerators()
        fn, args = pickle.loads(payload)
        if isinstance(fn, str):
            module, _, name = fn.partition(":")
            fn = getattr(importlib.import_module(module), name)
        value = fn(*args)
        dist.barrier()  # nobody leaves while another still talks to it
    except BaseException:
        writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    # Plain pickle: torch would pass tensors as descriptors that a rank which ends takes with it.
    writer.send_bytes(pickle.dumps((True, value)))
    dist.destroy_process_group()
