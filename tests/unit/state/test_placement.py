"""What placements take, and who keeps which rows."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_branch.state.placement import Placement, own_rows, stored_bytes


def test_files_take_whole_blocks_per_tensor() -> None:
    assert stored_bytes([1, 4096, 4097, 0], "nvme") == 4096 * 4
    assert stored_bytes([1, 4096], "host") == 4097
    assert str(Placement("host", "nvme")) == "state host, adjoint nvme, stage_input device"


@given(st.integers(0, 40), st.integers(1, 9))
def test_ranks_share_rows_without_gap_or_overlap(rows: int, size: int) -> None:
    shares = [own_rows(rows, size, rank) for rank in range(size)]
    assert [row for start, end in shares for row in range(start, end)] == list(range(rows))
    assert max(end - start for start, end in shares) == -(-rows // size)
