"""What the layers of one pass must know.

The descriptor is an argument of the model call and is bound to that pass alone: nothing is kept on modules or in
globals, so passes that are in flight together cannot read each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_branch.attention.kernel import Kernel
from megatron_branch.plan.shard import Shard
from megatron_branch.state.page import Page, read_layer


@dataclass(eq=False)
class PassDescriptor:
    """One pass over one unit.

    Attributes:
        positions: absolute position of each local token, int64 `[t]` (padding repeats the last one).
        shard: which tokens of the unit are attended to here (those of the Ulysses group, if there is one), and the
            attention calls inside it.
        context: pages of the prefix units on the path, root first.
        kernel: the attention kernel.
        cp_group: the ranks that pass queries to each other; None for one rank.
        ulysses_group: the ranks that exchange heads before and after attention; None for one rank.
        capture: the page to fill; None when the pass is not a capture.
        roots: for a replay, collects each layer's keys and values `[t, G, D]` (after the exchange of heads) as graph
            tensors: the page's own adjoint enters the backward there. None when the pass is not a replay.
        state_only: nothing after the last layer's keys and values is needed: the last stage, and no head to run.
        head: where the head runs; None on other stages than the last, and for a unit without loss.
    """

    positions: Tensor
    shard: Shard
    context: tuple[Page, ...]
    kernel: Kernel
    cp_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    capture: Page | None = None
    roots: dict[int, tuple[Tensor, Tensor]] | None = None
    state_only: bool = False
    head: HeadRows | None = None
    _descending: bool = False

    @contextmanager
    def read_state(self, layer: int, *, backward: bool) -> Iterator[tuple[tuple[Page, Tensor, Tensor], ...]]:
        """Each page of the context with its keys and values `[P, G, D]` of a layer, on the device inside the block.

        Meanwhile the layer is brought that the pass reads next: the one above in a forward, the one below in a
        backward, also where the backward runs a layer's forward again.
        """
        self._descending |= backward
        top = max((number for page in self.context for number in page.layers), default=layer) - self.state_only
        following = layer - 1 if self._descending else layer + 1
        with read_layer(
            self.context,
            layer,
            following=following if following <= top else None,
            adjoints=self._descending,
            last=backward or not self._descending,
        ) as pages:
            yield pages

    def take_state(self, layer: int, k_tGD: Tensor, v_tGD: Tensor) -> None:
        """Keep what the pass must keep of a layer's keys and values (padding included) before they are attended to."""
        if self.capture is not None:
            parts = [slice(start, end) for start, end in self.shard.valid] or [slice(0, 0)]
            k_PGD, v_PGD = (torch.cat([x_tGD.detach()[part] for part in parts]) for x_tGD in (k_tGD, v_tGD))
            self.capture.write(layer, k_PGD, v_PGD)
        if self.roots is not None:
            self.roots[layer] = (k_tGD, v_tGD)


@dataclass(eq=False)
class HeadRows:
    """Where the head runs: local token offsets `[n]` and their targets `[n]`, int64. n may be 0."""

    offsets: Tensor
    targets: Tensor
