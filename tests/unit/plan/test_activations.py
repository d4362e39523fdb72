"""Which chunks keep their graph, and how much that is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings

from megatron_branch.plan.activations import Precision, StageShape, activation_sizes, with_retained
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.orders import largest_path_bytes
from tests.branching import CONFIGS, SHAPE, SIZES, planned, prompt_with_tails, rollout, steps

FLOAT32 = Precision(4, fused_norms=False)


def retained(rows: Sequence[Rollout], budget: int | None, **config: object) -> list[str]:
    """Labels of the retained units; None retains everything."""
    keep = {"activations": "retain"} if budget is None else {"activations": "auto", "activation_budget_bytes": budget}
    plan, _ = planned(rows, config=BranchConfig.model_validate(keep | config))
    return [unit.label for unit in plan.ranks[0].units if unit.retained]


# Chunks of 4 tokens without loss: 40 bytes each on the fuller stage.
CHUNKED = prompt_with_tails(13, [3, 2])
# A prompt whose node forks into two prefixes, each with two leaves.
FORKED = [
    rollout([*range(5), *branch, *leaf], [5 + len(branch)])
    for branch in ([10, 11, 12, 13], [20, 21, 22, 23])
    for leaf in ([30, 31], [40, 41])
]


@pytest.mark.parametrize(
    ("budget", "labels"),
    [
        (None, ["0.0", "0.1", "0.2"]),
        (120, ["0.0", "0.1", "0.2"]),
        (119, ["0.1", "0.2"]),
        (79, ["0.2"]),
        (39, []),
        (0, []),
    ],
)
def test_the_last_chunks_of_a_path_come_first(budget: int | None, labels: list[str]) -> None:
    assert retained(CHUNKED, budget, chunk_tokens=4) == labels


def test_branches_use_the_budget_in_turn() -> None:
    """Both prefixes below the fork fit a budget of one of them: the first is let go before the second is captured."""
    plan, _ = planned(FORKED, config=BranchConfig(activations="retain"))
    sizes = {unit.label: unit.retained_bytes for unit in plan.ranks[0].units if unit.kind == "prefix"}
    below = [label for label, size in sizes.items() if size and label != "0.0"]
    assert len(below) == 2 and sizes["0.0"] > 0
    assert retained(FORKED, max(sizes[label] for label in below)) == below
    assert retained(FORKED, None) == ["0.0", *below]


def test_the_fuller_stage_and_the_padding_of_a_shard_count() -> None:
    plan, _ = planned(CHUNKED, config=BranchConfig(chunk_tokens=6))
    config = BranchConfig(activations="retain")
    for cp, local in ((1, 6), (2, 4), (4, 2)):
        units = with_retained(plan.ranks[0].units, config, SIZES, cp=cp)
        assert [unit.retained_bytes for unit in units if unit.kind == "prefix"] == [10 * local] * 2
    plan, _ = planned([rollout(range(9), [3, 8])], config=BranchConfig(chunk_tokens=4, activations="retain"))
    assert [unit.retained_bytes for unit in plan.ranks[0].units] == [12 * 4, 0]


def test_constants_are_never_retained() -> None:
    rows = [rollout([0, 1, 2, 3, 4], [2, 4]), rollout([0, 1, 2, 3, 5, 6], [5])]
    assert retained(rows, None, gradient="detached") == ["0.1"]
    assert retained(rows, None, gradient="dense") == []


@given(steps(), CONFIGS)
@settings(max_examples=60, deadline=None)
def test_no_path_exceeds_the_budget_and_none_could_take_more(rows: list[Rollout], config: BranchConfig) -> None:
    plan, _ = planned(rows, config=config, dp=2)
    for rank in plan.ranks:
        if config.activation_budget_bytes is None:
            continue
        assert largest_path_bytes(rank.units) <= config.activation_budget_bytes
        for unit in rank.units:
            if unit.replayed and not unit.retained:
                size = unit.tokens * (12 if unit.trained else 10)
                assert size + _below(unit, rank.units) > config.activation_budget_bytes


def _below(unit: Unit, units: Sequence[Unit]) -> int:
    """Most retained bytes on a path under a unit."""
    paths = [
        sum(units[prefix].retained_bytes for prefix in (*other.context, other.index) if prefix > unit.index)
        for other in units
        if unit.index in other.context
    ]
    return max(paths, default=0)


def test_a_layer_by_hand() -> None:
    """One float32 layer of the shape, no head norms: every saved tensor once."""
    hidden, ffn, heads, kv_heads, head_dim = 256, 768, 8, 2, 32
    norm = 4 * (2 * hidden + 1)
    to_values = norm + 4 * (hidden + (heads + 2 * kv_heads) * head_dim - kv_heads * head_dim + 2 * head_dim)
    rest = norm + 4 * (hidden + 2 * head_dim + 2 * heads * head_dim + heads + 5 * ffn)
    middle = activation_sizes(SHAPE, StageShape(1, first=False, last=False), FLOAT32, qk_norm=False)
    assert middle.plain == middle.trained == to_values + rest + 4 * hidden
    last = activation_sizes(SHAPE, StageShape(1, first=False, last=True), FLOAT32, qk_norm=False)
    assert last.plain == to_values
    assert last.trained == to_values + rest + norm + 4 * hidden + 16 + 8


def test_fused_norms_keep_no_second_copy() -> None:
    stage = StageShape(3, first=True, last=True, tp=2)
    bfloat16 = [activation_sizes(SHAPE, stage, Precision(2, fused), qk_norm=True) for fused in (False, True)]
    assert bfloat16[1].plain < 0.8 * bfloat16[0].plain
