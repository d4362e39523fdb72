"""How one unit is split over the ranks of context parallelism, and who attends to what inside it.

Coordinates: a unit's segments laid end to end are its *pack*, positions 0 .. tokens. With cp > 1 the pack is padded at
its end to `2 * cp` equal blocks; rank r holds block r and its mirror image 2 * cp - 1 - r, so that the causal diagonal
costs every rank the same. With cp = 1 there is one run and no padding.

Always true:
- the runs of all ranks partition 0 .. padded;
- padding is at the end of the pack: no token of the unit ever sees it;
- over all ranks, each (query, key) pair of one segment with key <= query lies in exactly one block of work, no other
  pair in any.
"""

from __future__ import annotations

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
    """What one rank holds of a unit.

    Attributes:
        tokens: inputs of the unit.
        padded: tokens over all ranks, padding included.
        runs: this rank's runs `(start, end)` in the pack, padding included, in local order.
        work: attention calls over this rank's own keys.
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


def shard_unit(segments: tuple[int, ...], *, cp: int, rank: int) -> Shard:
    """Split a unit whose segments have these lengths over `cp` ranks; the shard of `rank`."""
    tokens = sum(segments)
    if cp == 1:
        return Shard(tokens, tokens, ((0, tokens),), _work(segments, [(0, tokens)]))
    block = -(-tokens // (2 * cp))
    mirror = 2 * cp - 1 - rank
    runs = ((rank * block, (rank + 1) * block), (mirror * block, (mirror + 1) * block))
    owned = [runs[0], runs[1]]
    if runs[0][1] == runs[1][0]:
        owned = [(runs[0][0], runs[1][1])]
    clipped = [(start, min(end, tokens)) for start, end in owned if start < tokens]
    return Shard(tokens, 2 * cp * block, runs, _work(segments, clipped))


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
