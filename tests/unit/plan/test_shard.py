"""The shards of a unit cover its causal pairs once, whatever the number of ranks."""

import math

import numpy as np
import pytest

from megatron_branch.plan.shard import shard_unit

PACKS = [(1,), (2,), (7,), (64,), (5, 5, 5), (1, 1, 1, 1), (3, 9, 1, 9), (29, 1, 2), (4, 4, 2, 2, 2)]


def allowed(segments: tuple[int, ...]) -> np.ndarray:
    total = sum(segments)
    owner = np.repeat(np.arange(len(segments)), segments)
    index = np.arange(total)
    return (owner[:, None] == owner[None, :]) & (index[None, :] <= index[:, None])


@pytest.mark.parametrize(("cp", "size"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (8, 8)])
@pytest.mark.parametrize("segments", PACKS)
def test_work_covers_each_causal_pair_once(segments: tuple[int, ...], cp: int, size: int) -> None:
    seen = np.zeros((sum(segments), sum(segments)), dtype=int)
    for rank in range(0, cp, size):
        shard = shard_unit(segments, cp=cp, rank=rank, ulysses=size)
        mine = set(shard.pack_index[shard.pack_index < shard.tokens])
        for work in shard.work:
            q_step = (work.q_end - work.q_start) // work.count
            k_step = (work.k_end - work.k_start) // work.count
            for piece in range(work.count):
                q = np.arange(work.q_start + piece * q_step, work.q_start + (piece + 1) * q_step)
                k = np.arange(work.k_start + piece * k_step, work.k_start + (piece + 1) * k_step)
                assert set(k) <= mine
                first = shard.local_index(int(k[0]))
                assert [shard.local_index(int(key)) for key in k] == list(range(first, first + len(k)))
                pairs = np.ones((len(q), len(k)), dtype=int)
                if work.causal:
                    assert len(q) == len(k)
                    pairs = np.tril(pairs)
                seen[np.ix_(q, k)] += pairs
    np.testing.assert_array_equal(seen, allowed(segments).astype(int))


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("segments", PACKS)
def test_runs_partition_the_pack_and_padding_is_last(segments: tuple[int, ...], cp: int) -> None:
    shards = [shard_unit(segments, cp=cp, rank=rank) for rank in range(cp)]
    held = np.concatenate([shard.pack_index for shard in shards])
    assert sorted(held) == list(range(shards[0].padded))
    assert sum(shard.owned for shard in shards) == sum(segments)
    assert len({shard.local for shard in shards}) == 1
    for shard in shards:
        taken = np.concatenate([np.arange(a, b) for a, b in shard.valid] or [np.arange(0)])
        assert (shard.pack_index[taken.astype(int)] < shard.tokens).all()
        assert len(taken) == shard.owned


@pytest.mark.parametrize(("cp", "size"), [(2, 2), (4, 2), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("segments", PACKS)
def test_a_ulysses_group_holds_what_its_ranks_hold(segments: tuple[int, ...], cp: int, size: int) -> None:
    """First blocks of all ranks, then the mirrored ones in reverse: mirrored blocks of a smaller split, in order."""
    places = []
    for first in range(0, cp, size):
        group = [shard_unit(segments, cp=cp, rank=first + r, ulysses=size) for r in range(size)]
        assert group == group[:1] * size
        runs = [shard_unit(segments, cp=cp, rank=first + r).runs for r in range(size)]
        joined = [run[0] for run in runs] + [run[1] for run in reversed(runs)]
        np.testing.assert_array_equal(group[0].pack_index, np.concatenate([np.arange(*run) for run in joined]))
        places.append(group[0])
    assert sum(shard.owned for shard in places) == sum(segments)
    assert {shard.padded for shard in places} == {shard_unit(segments, cp=cp, rank=0).padded}


@pytest.mark.parametrize(("cp", "size"), [(1, 1), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("align", [2, 4, 6])
@pytest.mark.parametrize("segments", PACKS)
def test_a_rank_has_a_multiple_of_tokens(segments: tuple[int, ...], cp: int, size: int, align: int) -> None:
    """Sequence parallelism divides them; what is added is padding at the end, as little as possible."""
    shards = [shard_unit(segments, cp=cp, rank=rank, align=align) for rank in range(cp)]
    assert all(shard.local % align == 0 and shard.tokens == sum(segments) for shard in shards)
    assert sorted(np.concatenate([shard.pack_index for shard in shards])) == list(range(shards[0].padded))
    unit = align if cp == 1 else 2 * cp * align // math.gcd(align, 2)
    assert shards[0].padded - sum(segments) < unit
    groups = [shard_unit(segments, cp=cp, rank=rank, ulysses=size, align=align) for rank in range(0, cp, size)]
    assert sum(shard.owned for shard in groups) == sum(segments) and groups[0].padded == shards[0].padded


def test_equal_siblings_are_one_call_without_context_parallelism() -> None:
    assert len(shard_unit((5, 5, 5), cp=1, rank=0).work) == 1
