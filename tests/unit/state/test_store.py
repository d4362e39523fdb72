"""Pages live inside a step, are counted to the byte, and never outlive an error."""

import errno
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_branch.state.page import Page
from megatron_branch.state.placement import Placement
from megatron_branch.state.store import StateStore


def kv(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(tokens, 2, 4, dtype=dtype), torch.ones(tokens, 2, 4, dtype=dtype)


def test_bytes_by_kind_now_and_at_the_peak() -> None:
    store = StateStore()
    with store.step():
        page = store.open(0, differentiable=True)
        page.write(1, *kv(3, torch.bfloat16))
        page.add_adjoint(1, *kv(3, torch.bfloat16))
        page.add_adjoint(1, *kv(3, torch.bfloat16))
        page.keep_input(torch.zeros(4, 1, 8, dtype=torch.bfloat16))
        page.count_graph(5)
        assert store.count.now == {
            "state": 2 * 24 * 2,
            "adjoint": 2 * 24 * 4,
            "stage_input": 64,
            "moving": 0,
            "activations": 5,
        }
        with page.own_adjoint(1) as adjoints:
            for adjoint in adjoints:
                assert adjoint.dtype == torch.float32 and torch.equal(adjoint, torch.full((3, 2, 4), 2.0))
        store.release(0)
        assert set(store.count.now.values()) == {0}
    assert store.count.peak == {"state": 96, "adjoint": 192, "stage_input": 64, "moving": 0, "activations": 5}
    assert store.count.peak_total == 96 + 192 + 64 + 5


def test_a_running_bfloat16_sum_would_lose_what_the_adjoint_keeps() -> None:
    store = StateStore()
    with store.step():
        page = store.open(0, differentiable=True)
        page.write(1, *kv(1, torch.bfloat16))
        for _ in range(1024):
            page.add_adjoint(1, *kv(1, torch.bfloat16))
        with page.own_adjoint(1) as adjoints:
            assert adjoints[0].unique().tolist() == [1024.0]  # bfloat16 stops at 256
        store.release(0)


def test_left_over_pages_are_listed() -> None:
    store = StateStore()
    with pytest.raises(RuntimeError, match=r"units \[2, 5\]"), store.step():
        store.open(5, differentiable=True)
        store.open(2, differentiable=True)


def test_an_error_inside_a_step_leaves_nothing_behind() -> None:
    store = StateStore()
    with pytest.raises(KeyError), store.step():
        store.open(0, differentiable=True).write(1, *kv(3))
        raise KeyError
    assert set(store.count.now.values()) == {0}
    with store.step():
        store.open(0, differentiable=True)
        store.release(0)


def test_a_page_that_cannot_be_freed_keeps_no_other(tmp_path: Path) -> None:
    store = StateStore(placement=Placement.everything("nvme"), nvme_path=tmp_path)
    free = Page.free

    def fail(page: Page) -> None:
        free(page)
        if page.unit == 1:
            raise ZeroDivisionError

    with patch.object(Page, "free", fail), pytest.raises(ZeroDivisionError), store.step():
        for unit in range(3):
            store.open(unit, differentiable=True).write(1, *kv(3))
        raise KeyError
    assert set(store.count.now.values()) == {0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with store.step():
        assert not store.count.peak_total


def test_of_a_full_disk_the_first_write_that_failed_is_reported(tmp_path: Path) -> None:
    """Not what goes wrong after it, when the step is taken apart."""
    store = StateStore(placement=Placement.everything("nvme"), nvme_path=tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("os.pwrite", side_effect=full), pytest.raises(OSError, match=r"path .*/state-0-1, wanted"), store.step():
        for unit in range(2):
            store.open(unit, differentiable=True).write(1, *kv(3))
        store.settle()
    assert set(store.count.now.values()) == {0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_nobody_waits_for_any_more_hides_no_error(tmp_path: Path) -> None:
    store = StateStore(placement=Placement.everything("nvme"), nvme_path=tmp_path)
    with pytest.raises(KeyError), store.step():
        page = store.open(0, differentiable=True)
        page.write(1, *kv(3))
        store.settle()
        for path in tmp_path.rglob("state-*"):
            path.unlink()
        page.prefetch(1, adjoint=False)
        raise KeyError
    assert set(store.count.now.values()) == {0}


def test_weights_must_not_change_inside_a_step() -> None:
    store = StateStore()
    store.refuse_inside_step("an optimizer step")
    with store.step(), pytest.raises(RuntimeError, match="an optimizer step inside an open step"):
        store.refuse_inside_step("an optimizer step")


def test_a_layer_is_written_once_and_a_constant_takes_no_gradient() -> None:
    with StateStore().step() as store:
        page = store.open(0, differentiable=False)
        page.write(1, *kv(2))
        with pytest.raises(AssertionError, match="written twice"):
            page.write(1, *kv(2))
        with pytest.raises(AssertionError, match="constant"):
            page.add_adjoint(1, *kv(2))
        with pytest.raises(AssertionError, match="captured twice"):
            store.open(0, differentiable=True)
        store.release(0)
