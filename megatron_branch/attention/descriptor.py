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
        roots: for a pass whose page's own adjoint will enter its backward, collects each layer's keys and values
            `[t, G, D]` (after the exchange of heads) as graph tensors: it enters there. None for tails, and for
            captures without autograd.
        state_only: nothing after the last layer's keys and values is needed: the last stage, and no head to run.
        head: where the head runs; None on other stages than the last, and for a unit without loss.
        recompute_layers: each layer keeps its input alone, and is computed again in the backward. Neither `capture` nor
            `roots` is set by then, so that state is taken once.
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
    recompute_layers: bool = False
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
            self.capture.write(layer, self._owned(k_tGD.detach()), self._owned(v_tGD.detach()))
        if self.roots is not None:
            self.roots[layer] = (k_tGD, v_tGD)

    def _owned(self, x_tGD: Tensor) -> Tensor:
        """What is no padding: a view where a graph keeps the memory in any case, else a copy that keeps no more."""
        parts = [x_tGD[start:end] for start, end in self.shard.valid] or [x_tGD[:0]]
        return parts[0] if self.roots is not None and len(parts) == 1 else torch.cat(parts)


@dataclass(eq=False)
class HeadRows:
    """Where the head runs: local token offsets `[n]` and their targets `[n]`, int64. n may be 0."""

    offsets: Tensor
    targets: Tensor
