"""The pages of one step on one rank: opened by captures, read by later passes, released by the schedule.

Always true:
- pages exist only inside `with store.step():`; what is left over at its end raises and is listed;
- an exception inside the block drops every page, so the next step starts clean;
- inside the block weights must not change: `refuse_inside_step` is called by the optimizer step and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.page import Page


class StateStore:
    """Owner of every byte that a captured prefix leaves on this rank."""

    def __init__(self) -> None:
        self.count = ByteCount()
        self._pages: dict[int, Page] = {}
        self._open = False

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
            for unit in list(self._pages):
                self.release(unit)
            self._open = False

    def open(self, unit: int, *, differentiable: bool) -> Page:
        """A new page for a captured unit."""
        assert self._open, "states exist only inside a step"
        assert unit not in self._pages, f"unit {unit} is captured twice"
        page = Page(unit, self.count, differentiable)
        self._pages[unit] = page
        return page

    def page(self, unit: int) -> Page:
        """The page of a captured unit that is not released yet."""
        return self._pages[unit]

    def release(self, unit: int) -> None:
        """Free a unit's page."""
        page = self._pages.pop(unit)
        for kind, size in page.bytes_by_kind().items():
            self.count.add(kind, -size)

    def refuse_inside_step(self, action: str) -> None:
        """Raise RuntimeError when a step is open: the replay must see the weights that the capture saw."""
        if self._open:
            raise RuntimeError(f"{action} inside an open step: the replay would see other weights than the capture")
