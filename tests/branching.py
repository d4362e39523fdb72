"""Small steps of rollouts for tests of planning and ordering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from megatron_branch.plan.activations import ActivationSizes
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.cost import ModelShape
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.plan import Aggregation, Plan, Unit
from megatron_branch.plan.rules import assert_always_true
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree

# Bytes per token of retained graphs; the second stage is fuller, and keeps more for a trained chunk.
SIZES = (ActivationSizes(1, plain=9, trained=9), ActivationSizes(1, plain=10, trained=12))
SHAPE = ModelShape(layers=4, hidden=256, ffn=768, heads=8, kv_heads=2, head_dim=32, vocab=2048)


def rollout(ids: Sequence[int], trained: Sequence[int], name: str = "r") -> Rollout:
    """A rollout that trains the token positions `trained`."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[list(trained)] = True
    return Rollout(
        group_id="g",
        rollout_id=name,
        token_ids=np.array(ids, dtype=np.int64),
        loss_mask=mask,
        prompt_length=min(trained, default=len(ids)),
        reward=1.0,
        source="rows.jsonl:1",
    )


def prompt_with_tails(prompt: int, tails: Sequence[int]) -> list[Rollout]:
    """One prompt and trained tails of the given lengths, which differ in their first token."""
    rows = []
    for index, length in enumerate(tails):
        ids = [*range(prompt), *range(1000 * (index + 1), 1000 * (index + 1) + length)]
        rows.append(rollout(ids, range(prompt, prompt + length), f"r{index}"))
    return rows


def planned(
    rollouts: Sequence[Rollout],
    *,
    dp: int = 1,
    aggregation: Aggregation = "token-mean",
    config: BranchConfig | None = None,
) -> tuple[Plan, tuple[Tree, ...]]:
    """A checked plan and its trees."""
    config = config or BranchConfig()
    trees = build_trees(rollouts, share=config.gradient != "dense")
    layout = Layout(dp=dp)
    plan = make_plan(trees, rollouts, config=config, layout=layout, aggregation=aggregation, shape=SHAPE, sizes=SIZES)
    assert_always_true(plan, trees, rollouts)
    return plan, trees


def drawn(units: Sequence[Unit]) -> list[str]:
    """`C0.0[0:5]` per unit: letter, label, ranges; lower case where it is not replayed."""
    letter = {("prefix", True): "C", ("prefix", False): "c", ("tail", False): "T"}
    names = []
    for unit in units:
        ranges = ",".join(f"{segment.start}:{segment.end}" for segment in unit.segments)
        names.append(f"{letter[unit.kind, unit.replayed]}{unit.label}[{ranges}]")
    return names


@st.composite
def steps(draw: st.DrawFn, *, most_rows: int = 8, most_tokens: int = 9) -> list[Rollout]:
    """Rollouts over three ids, so that they fork anywhere, end inside each other and repeat; one token is trained."""
    rows = []
    for index in range(draw(st.integers(1, most_rows))):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=most_tokens))
        flags = draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
        rows.append(rollout(ids, [at + 1 for at, flag in enumerate(flags) if flag], f"r{index}"))
    rows.append(rollout([0, 1], [1], "sure"))
    return rows


CONFIGS = st.builds(
    lambda keep, **values: BranchConfig(**keep, **values),
    keep=st.sampled_from(
        [
            {"activations": "recompute"},
            {"activations": "retain"},
            {"activations": "auto", "activation_budget_bytes": 0},
            {"activations": "auto", "activation_budget_bytes": 30},
            {"activations": "auto", "activation_budget_bytes": 60},
        ]
    ),
    recompute_layers=st.booleans(),
    gradient=st.sampled_from(["exact", "detached", "dense"]),
    chunk_tokens=st.sampled_from([None, 1, 2, 3, 5]),
    pack_tokens=st.sampled_from([1, 4, 2048]),
)
