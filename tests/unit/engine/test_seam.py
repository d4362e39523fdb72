"""Batches that are no trees go to Megatron's own function with every argument unchanged."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_branch.engine import seam

KEYWORDS = {
    "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size",
    "decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn",
    "p2p_communicator", "pg_collection", "force_all_reduce",
}  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    record: dict[str, Any] = {}

    def megatron(**options: Any) -> Any:
        record["options"] = options

        def run(**arguments: Any) -> str:
            record.update(arguments)
            return "theirs"

        return run

    monkeypatch.setattr(seam, "megatron_forward_backward_func", megatron)
    return record


def arguments(**given: Any) -> dict[str, Any]:
    values = {name: object() for name in KEYWORDS}
    return values | {"forward_only": False} | given


def test_every_keyword_passes_through(seen: dict[str, Any]) -> None:
    given = arguments(data_iterator=None)
    assert seam.get_forward_backward_func()(**given) == "theirs"
    assert {name: seen[name] for name in KEYWORDS} == given
    assert seen["options"] == {}


def test_a_peeked_iterator_still_yields_its_first_item(seen: dict[str, Any]) -> None:
    seam.get_forward_backward_func(pp_size=2, vp_size=3)(**arguments(data_iterator=iter([1, 2, 3])))
    assert isinstance(seen["data_iterator"], Iterator)
    assert list(seen["data_iterator"]) == [1, 2, 3]
    assert seen["options"] == {"pp_size": 2, "vp_size": 3}


def test_lists_of_iterators_are_megatron_s(seen: dict[str, Any]) -> None:
    chunks = [iter([1]), iter([2])]
    seam.get_forward_backward_func()(**arguments(data_iterator=chunks))
    assert [list(one) for one in seen["data_iterator"]] == [[1], [2]]


def test_megatron_still_has_these_keywords() -> None:
    import inspect

    from megatron.core.pipeline_parallel import schedules

    for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving"):
        theirs = set(inspect.signature(getattr(schedules, f"forward_backward_{name}")).parameters)
        assert theirs == KEYWORDS
