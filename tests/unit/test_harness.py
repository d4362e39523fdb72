"""The harness itself: results, first failure, death, timeout, nobody left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.harness import RankError, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, str | None]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), os.environ.get("OMP_NUM_THREADS")


def _fail_on_one(folder: str) -> None:
    import torch
    import torch.distributed as dist

    (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("planted")
    dist.all_reduce(torch.zeros(1))


def _die_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(60)


def _hang(folder: str) -> None:
    import torch.distributed as dist

    (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
    time.sleep(60)


def _alive(folder: Path) -> list[int]:
    pids = [int(file.read_text()) for file in folder.iterdir()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_results_come_by_rank() -> None:
    assert run_ranks(2, _sum_of_ranks, 10) == [(0, 21, "1"), (1, 21, "1")]


def test_first_traceback_names_its_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="KeyError: 'planted'") as caught:
        run_ranks(2, _fail_on_one, str(tmp_path), timeout_s=30)
    assert caught.value.rank == 1
    assert len(list(tmp_path.iterdir())) == 2 and not _alive(tmp_path)


def test_silent_death_is_reported() -> None:
    with pytest.raises(RankError, match="rank 1 failed first:\ndied with exit code 7"):
        run_ranks(2, _die_on_one, timeout_s=30)


def test_timeout_kills_everybody(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 not done after 9"):
        run_ranks(2, _hang, str(tmp_path), timeout_s=9)
    assert len(list(tmp_path.iterdir())) == 2 and not _alive(tmp_path)
