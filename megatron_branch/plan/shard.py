"""How one unit is split over the ranks of context parallelism, and who attends to what inside it.

Coordinates: a unit's segments laid end to end are its *pack*, positions 0 .. tokens. With cp > 1 the pack is padded at
its end to `2 * cp` equal blocks; rank r holds block r and its mirror image 2 * cp - 1 - r, so that the causal diagonal
costs every rank the same. With cp = 1 there is one run and no padding but what `align` asks for.

Ulysses joins the blocks of u consecutive ranks: ranks o * u .. o * u + u - 1 hold the blocks o * u .. o * u + u - 1 and
their mirror images, which laid end to end are block o and its mirror image of a split over cp / u ranks. So attention
after the exchange of heads sees an ordinary shard, of one rank out of cp / u.

Always true:
- the runs of all ranks (or of all Ulysses groups) partition 0 .. padded;
- padding is at the end of the pack: no token of the unit ever sees it;
- over all ranks (or all Ulysses groups), each (query, key) pair of one segment with key <= query lies in exactly one
  block of work, no other pair in any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Work:
    """One attention call over a unit's own tokens: queries `[q_start, q_end)` of the pack see keys `[k_start, k_end)`.

    `count` equal pieces laid end to end are independent of each other (a batch); `causal` pieces have as many queries
    as keys.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    count: int = 1


@dataclass(frozen=True)
class Shard:
    """What one rank, or one Ulysses group, holds of a unit.

    Attributes:
        tokens: inputs of the unit.
        padded: tokens over all ranks, padding included.
        runs: the runs `(start, end)` held, in the pack, padding included, in local order.
        work: attention calls over the keys held.
    """

    tokens: int
    padded: int
    runs: tuple[tuple[int, int], ...]
    work: tuple[Work, ...]

    @property
    def local(self) -> int:
        """Local tokens, padding included."""
        return sum(end - start for start, end in self.runs)

    @cached_property
    def pack_index(self) -> npt.NDArray[np.int64]:
        """Pack coordinate of each local token, `[local]`; >= `tokens` for padding."""
        return np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in self.runs])

    @cached_property
    def valid(self) -> tuple[tuple[int, int], ...]:
        """Local ranges that hold tokens of the unit, in local order."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for start, end in self.runs:
            stop = min(end, self.tokens)
            if stop > start:
                if ranges and ranges[-1][1] == offset:
                    ranges[-1] = (ranges[-1][0], offset + stop - start)
                else:
                    ranges.append((offset, offset + stop - start))
            offset += end - start
        return tuple(ranges)

    @property
    def owned(self) -> int:
        """Local tokens without padding: what this rank adds to the state."""
        return sum(end - start for start, end in self.valid)

    def local_index(self, key: int) -> int:
        """Local offset of a pack coordinate that this rank holds."""
        offset = 0
        for start, end in self.runs:
            if start <= key < end:
                return offset + key - start
            offset += end - start
        raise AssertionError(f"pack coordinate {key} is not on this rank")


def shard_unit(segments: tuple[int, ...], *, cp: int, rank: int, ulysses: int = 1, align: int = 1) -> Shard:
    """Split a unit whose segments have these lengths over `cp` ranks.

    Args:
        segments: lengths, in tokens.
        cp: number of context-parallel ranks.
        rank: one of them.
        ulysses: size of the Ulysses groups, a divisor of cp.
        align: a rank's tokens, padding included, are a multiple of it.

    Returns:
        The shard of `rank`; with `ulysses` > 1 that of its group, what the rank has after the exchange of heads.
    """
    tokens = sum(segments)
    if cp == 1:
        padded = _round_up(tokens, align)
        return Shard(tokens, padded, ((0, padded),), _work(segments, [(0, tokens)]))
    block = ulysses * _round_up(-(-tokens // (2 * cp)), align // math.gcd(align, 2))
    places, place = cp // ulysses, rank // ulysses
    mirror = 2 * places - 1 - place
    runs = ((place * block, (place + 1) * block), (mirror * block, (mirror + 1) * block))
    owned = [runs[0], runs[1]]
    if runs[0][1] == runs[1][0]:
        owned = [(runs[0][0], runs[1][1])]
    clipped = [(start, min(end, tokens)) for start, end in owned if start < tokens]
    return Shard(tokens, 2 * places * block, runs, _work(segments, clipped))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _work(segments: tuple[int, ...], owned: list[tuple[int, int]]) -> tuple[Work, ...]:
    """Calls over the keys in `owned`: the diagonal of each piece, then the rest of its segment."""
    diagonal: list[Work] = []
    below: list[Work] = []
    seg_start = 0
    for length in segments:
        seg_end = seg_start + length
        for start, end in owned:
            k_start, k_end = max(start, seg_start), min(end, seg_end)
            if k_start >= k_end:
                continue
            last = diagonal[-1] if diagonal else None
            if (
                last is not None
                and last.q_end == k_start
                and (last.q_end - last.q_start) == (k_end - k_start) * last.count
            ):
                diagonal[-1] = Work(last.q_start, k_end, last.k_start, k_end, True, last.count + 1)
            else:
                diagonal.append(Work(k_start, k_end, k_start, k_end, True))
            if k_end < seg_end:
                below.append(Work(k_end, seg_end, k_start, k_end, False))
        seg_start = seg_end
    return (*diagonal, *below)
