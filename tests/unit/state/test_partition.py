"""A rank keeps its rows, in memory of their own; `tests/parity/test_placement.py` gathers them."""

import pytest
import torch

from megatron_branch.state.partition import Replicas


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_parts_are_all_rows_and_hold_no_more_memory_than_they_count(rows: int) -> None:
    hidden = torch.randn(rows, 1, 4)
    parts = [Replicas(None, 3, rank).part(hidden) for rank in range(3)]
    assert torch.equal(torch.cat(parts), hidden)
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]
    assert Replicas().part(hidden) is hidden and Replicas().whole(hidden, rows) is hidden
