"""FLOPs of units and plans."""

from __future__ import annotations

import pytest

from megatron_branch.plan.cost import ModelShape, causal_pairs, plan_flops, training_flops, unit_flops
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Segment, Unit
from megatron_branch.plan.tables import loss_rows
from tests.branching import SHAPE, planned, prompt_with_tails


def a_unit(*ranges: tuple[int, int], kind: str = "tail") -> Unit:
    segments = tuple(Segment(node, *piece) for node, piece in enumerate(ranges))
    return Unit(0, 0, "0.0", kind, segments, (), True, kind == "prefix")  # type: ignore[arg-type]


def by_hand(prompt: int, tails: int, length: int) -> tuple[float, float, float]:
    """Dense, exact and detached FLOPs of one prompt with equal tails, from the formulas of the cost page."""
    layers, hidden, ffn, heads, kv_heads, head_dim, vocab = 4, 256, 768, 8, 2, 32, 2048
    weights = hidden * heads * head_dim * 2 + hidden * kv_heads * head_dim * 2 + 3 * hidden * ffn
    linear, pair, head = 2 * layers * weights, 2 * 2 * layers * heads * head_dim, 2 * hidden * vocab
    whole = prompt + length - 1
    dense = tails * (3 * whole * linear + 3.5 * pair * whole * (whole + 1) / 2 + 3 * length * head)
    forward = (prompt - 1) * linear + pair * (prompt - 1) * prompt / 2
    replay = 3 * (prompt - 1) * linear + 3.5 * pair * (prompt - 1) * prompt / 2
    pairs = length * (prompt - 1) + length * (length + 1) / 2
    tail = tails * (3 * length * linear + 3.5 * pair * pairs + 3 * length * head)
    return dense, forward + replay + tail, forward + tail


@pytest.mark.parametrize("chunk_tokens", [None, 512])
def test_the_bench_case_has_the_bounds_of_the_design(chunk_tokens: int | None) -> None:
    dense, exact, detached = by_hand(2048, 8, 128)
    rows = prompt_with_tails(2048, [128] * 8)
    plan, trees = planned(rows, config=BranchConfig(gradient="exact", chunk_tokens=chunk_tokens))
    flops = plan_flops(plan, trees, SHAPE)
    # Sums of integers below 2**53 times 3.5: exact in float64.
    assert flops.dense == dense and flops.executed == exact
    assert flops.bound == pytest.approx(4.1874, abs=5e-5)
    plan, trees = planned(rows, config=BranchConfig(gradient="detached", chunk_tokens=chunk_tokens))
    flops = plan_flops(plan, trees, SHAPE)
    assert flops.dense == dense and flops.executed == detached
    assert flops.bound == pytest.approx(8.0001, abs=5e-5)


@pytest.mark.parametrize(
    ("case", "bounds"),
    [((2048, 8, 128), (4.18, 4.92)), ((4096, 8, 64), (5.42, 6.77)), ((4096, 16, 256), (5.85, 6.50))],
)
def test_a_retained_prefix_saves_its_third_forward(case: tuple[int, int, int], bounds: tuple[float, float]) -> None:
    """The bounds that the design's benchmark states; those were rounded down or to the nearest."""
    prompt, count, length = case
    rows = prompt_with_tails(prompt, [length] * count)
    found = []
    for activations in ("recompute", "retain"):
        plan, trees = planned(rows, config=BranchConfig.model_validate({"activations": activations}))
        found.append(plan_flops(plan, trees, SHAPE))
    assert [flops.bound for flops in found] == pytest.approx(bounds, abs=0.01)
    forward = found[0].by_phase["capture"]
    assert found[0].executed - found[1].executed == forward == found[1].by_phase["capture"]


def test_recomputed_layers_add_a_forward_to_what_goes_backward() -> None:
    """To tails, and to replays of chunks that are not retained; the head is not run again."""
    rows = prompt_with_tails(30, [3, 9, 1])
    for keep in ({}, {"activations": "auto", "activation_budget_bytes": 80}, {"activations": "retain"}):
        plain, again = (
            plan_flops(*planned(rows, config=BranchConfig(chunk_tokens=7, recompute_layers=layers, **keep)), SHAPE)
            for layers in (False, True)
        )
        plan, _ = planned(rows, config=BranchConfig(chunk_tokens=7, **keep))
        units = [u for u in plan.ranks[0].units if u.kind == "tail" or (u.replayed and not u.retained)]
        extra = sum(unit_flops(unit, SHAPE, phase="capture") for unit in units)
        assert again.executed - plain.executed == extra > 0


def test_dense_plans_execute_what_dense_training_costs() -> None:
    plan, trees = planned(prompt_with_tails(20, [3, 9]), config=BranchConfig(gradient="dense"))
    assert plan_flops(plan, trees, SHAPE).bound == 1.0


def test_phases_add_up_and_match_the_units() -> None:
    rows = prompt_with_tails(30, [3, 9, 1])
    plan, trees = planned(rows, config=BranchConfig(chunk_tokens=7, pack_tokens=4))
    flops = plan_flops(plan, trees, SHAPE)
    units = [unit for rank in plan.ranks for unit in rank.units]
    total = sum(training_flops(unit, SHAPE, rows=len(loss_rows(unit, trees, rows).rows)) for unit in units)
    assert flops.executed == sum(flops.by_phase.values()) == total


def test_packed_segments_do_not_see_each_other() -> None:
    shape = ModelShape(1, 1, 1, 1, 1, 1, 1)
    packed = unit_flops(a_unit((4, 6), (4, 9)), shape, phase="capture")
    apart = [unit_flops(a_unit(piece), shape, phase="capture") for piece in ((4, 6), (4, 9))]
    assert packed == sum(apart)
    assert causal_pairs(2, 4) == 4 + 1 + 4 + 2


def test_passes_count_their_backward_and_head() -> None:
    shape = ModelShape(1, 1, 1, 1, 1, 1, 1)
    unit = a_unit((0, 3))
    linear, attention, head = 2 * 7 * 3, 4 * 6, 2
    assert unit_flops(unit, shape, phase="capture", rows=2) == linear + attention
    assert unit_flops(unit, shape, phase="score", rows=2) == linear + attention + 2 * head
    assert unit_flops(unit, shape, phase="tail", rows=2) == 3 * linear + 3.5 * attention + 6 * head
    assert unit_flops(unit, shape, phase="replay") == 3 * linear + 3.5 * attention
