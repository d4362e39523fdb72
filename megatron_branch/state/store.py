"""The pages of one step on one rank: opened by captures, read by later passes, released by the schedule.

Always true:
- pages exist only inside `with store.step():`; what is left over at its end raises and is listed;
- an exception inside the block drops every page and every file, so the next step starts clean;
- between two actions nothing is on its way between places;
- inside the block weights must not change: `refuse_inside_step` is called by the optimizer step and the checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.copies import Copies, HostMemory, copies_for
from megatron_branch.state.files import StateFolder
from megatron_branch.state.keep import Keeper
from megatron_branch.state.page import Page
from megatron_branch.state.partition import Replicas
from megatron_branch.state.placement import Placement


class StateStore:
    """Owner of every byte that a captured prefix leaves on this rank.

    Args:
        device: where state is read.
        placement: where it is kept; may be set anew between steps.
        nvme_path: where files go; needed for a placement that has any.
        replicas: the ranks that hold the same stage inputs.
        copies: how tensors move; None: as the device needs it.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        placement: Placement | None = None,
        nvme_path: Path | None = None,
        replicas: Replicas | None = None,
        copies: Copies | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.count = ByteCount()
        self.replicas = replicas or Replicas()
        self._keeper = Keeper(
            count=self.count,
            device=device,
            copies=copies or copies_for(device),
            host=HostMemory(pin=device.type == "cuda"),
            folder=None if nvme_path is None else StateFolder(nvme_path),
            placement=placement or Placement(),
            leaving=deque(),
        )
        self._pages: dict[int, Page] = {}
        self._open = False

    def place(self, placement: Placement) -> None:
        """Keep the state of later steps so."""
        assert not self._open, "the placement changes between steps"
        self._keeper.placement = placement

    @contextmanager
    def step(self) -> Iterator[StateStore]:
        """Hold states for one step.

        Raises:
            RuntimeError: the schedule left pages behind.
        """
        assert not self._open, "a step is open already"
        self._open = True
        self.count.reset_peak()
        try:
            yield self
            if self._pages:
                raise RuntimeError(f"the schedule left the state of units {sorted(self._pages)} behind")
        finally:
            self._open = False
            with ExitStack() as closing:  # each part runs, also where another raises
                closing.callback(self._keeper.close_step)
                for unit in list(self._pages):
                    closing.callback(self.release, unit)
                closing.callback(self._keeper.abandon)

    def open(self, unit: int, *, differentiable: bool) -> Page:
        """A new page for a captured unit."""
        assert self._open, "states exist only inside a step"
        assert unit not in self._pages, f"unit {unit} is captured twice"
        page = Page(unit, self._keeper, self.replicas, differentiable)
        self._pages[unit] = page
        return page

    def page(self, unit: int) -> Page:
        """The page of a captured unit that is not released yet."""
        return self._pages[unit]

    def settle(self) -> None:
        """An action is done: wait for what it sent out.

        Raises:
            OSError: a file could not be written.
        """
        self._keeper.settle()

    def release(self, unit: int) -> None:
        """Free a unit's page."""
        self._pages.pop(unit).free()

    def refuse_inside_step(self, action: str) -> None:
        """Raise RuntimeError when a step is open: the replay must see the weights that the capture saw."""
        if self._open:
            raise RuntimeError(f"{action} inside an open step: the replay would see other weights than the capture")
