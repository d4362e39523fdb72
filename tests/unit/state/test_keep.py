"""Off the device, tensors come back as they were, in time, and with no more memory than is counted."""

from __future__ import annotations

import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_branch.state.copies import HostMemory
from megatron_branch.state.keep import Keeper
from megatron_branch.state.page import read_layer
from megatron_branch.state.placement import Place, Placement
from megatron_branch.state.store import StateStore
from tests.delayed import DelayedCopies, DelayedCopy

AWAY = [("host", False), ("nvme", True)]


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3, 2, 4), float(value)), torch.full((3, 2, 4), -float(value))


def use(store: StateStore) -> tuple[list[float], list[float]]:
    """Two layers of one page written, read upwards and downwards with gradients; keys and their adjoints as read."""
    keys, adjoints = [], []
    with store.step():
        page = store.open(0, differentiable=True)
        for layer in (1, 2, 3):
            page.write(layer, *pair(layer))
        store.settle()
        for layer, following in ((1, 2), (2, 3), (3, None)):
            with read_layer([page], layer, following=following, adjoints=False, last=True) as ((_, k, _v),):
                keys.append(k.unique().item())
        for _ in range(2):
            for layer, following in ((3, 2), (2, 1), (1, None)):
                with read_layer([page], layer, following=following, adjoints=True, last=True) as ((_, k, _v),):
                    keys.append(k.unique().item())
                    page.add_adjoint(layer, *pair(10.0 * layer))
            store.settle()
        for layer in (1, 2, 3):
            with page.own_adjoint(layer) as kept:
                assert kept is not None
                adjoints.append(kept[0].unique().item())
        assert store.count.now["moving"] == 0
        store.release(0)
    return keys, adjoints


@pytest.mark.parametrize(("place", "files"), AWAY)
def test_late_copies_are_waited_for(tmp_path: Path, place: Place, files: bool) -> None:
    copies = DelayedCopies()
    store = StateStore(placement=Placement.everything(place), nvme_path=tmp_path if files else None, copies=copies)
    assert use(store) == ([1, 2, 3, 3, 2, 1, 3, 2, 1], [20, 40, 60])
    assert copies.lost == 0
    assert store.count.now_at == {"device": 0, "host": 0, "nvme": 0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("place", "files"), AWAY)
def test_what_is_here_is_not_fetched_again(tmp_path: Path, place: Place, files: bool) -> None:
    """A second reader sees what the first one changed."""
    store = StateStore(placement=Placement.everything(place), nvme_path=tmp_path if files else None)
    with store.step():
        page = store.open(0, differentiable=True)
        page.write(1, *pair(1))
        page.write(2, *pair(2))
        store.settle()
        with read_layer([page], 1, following=None, adjoints=False, last=False) as ((_, first, _v),):
            first.add_(1)
            with read_layer([page], 1, following=None, adjoints=False, last=False) as ((_, second, _w),):
                assert second is first
        store.release(0)
    assert store.count.now_at == {"device": 0, "host": 0, "nvme": 0}


def unwaited(self: DelayedCopy) -> None:
    pass


def forgotten(self: Keeper, *, but: int | None = None) -> None:
    """Lets go of what is on its way out without waiting for it."""
    for left in self.leaving:
        self.count_moving(-left.size, left.place)
    self.leaving.clear()


def test_a_missing_wait_shows() -> None:
    def wrong() -> bool:
        copies = DelayedCopies()
        store = StateStore(placement=Placement.everything("host"), copies=copies)
        try:
            return use(store) != ([1, 2, 3, 3, 2, 1, 3, 2, 1], [20, 40, 60]) or copies.lost > 0
        except (RuntimeError, ValueError):  # memory that was never filled has many values
            return True

    assert not wrong()
    with patch.object(DelayedCopy, "wait", unwaited):
        assert wrong()
    with patch.object(Keeper, "settle", forgotten):
        assert wrong()


def test_two_layers_are_on_the_device_at_a_time() -> None:
    store = StateStore(placement=Placement(state="host"))
    with store.step():
        page = store.open(0, differentiable=False)
        for layer in range(1, 9):
            page.write(layer, *pair(layer))
        store.settle()
        layer_bytes = 2 * 24 * 4
        assert store.count.now == {
            "state": 8 * layer_bytes, "adjoint": 0, "stage_input": 0, "moving": 0, "activations": 0
        }  # fmt: skip
        assert store.count.peak["moving"] == layer_bytes
        for layer in range(1, 9):
            with read_layer([page], layer, following=layer + 1, adjoints=False, last=True):
                assert store.count.now_at["device"] <= 2 * layer_bytes
        assert store.count.peak["moving"] == 2 * layer_bytes and store.count.now["moving"] == 0
        store.release(0)


def test_refused_page_locked_memory_is_said_once_and_replaced() -> None:
    memory = HostMemory(pin=True)
    real = torch.empty

    def refuse(*shape: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return real(*shape, **options)

    with warnings.catch_warnings(record=True) as said, patch("torch.empty", refuse):
        warnings.simplefilter("always")
        tensors = [memory.empty_like(torch.zeros(2, 3)) for _ in range(3)]
    assert [
        str(one.message).startswith("page-locked memory was refused (CUDA error: out of memory)") for one in said
    ] == [True]
    assert not memory.pinned and all(tensor.shape == (2, 3) for tensor in tensors)
