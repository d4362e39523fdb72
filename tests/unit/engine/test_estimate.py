"""What the configuration changes in the bytes of a shard."""

import pytest

from megatron_branch.config import make_config
from megatron_branch.engine.architecture import architecture_from_config
from megatron_branch.engine.estimate import Estimate, busiest_rank, held_by_model
from megatron_branch.engine.random_model import random_source
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.limits import Layout
from megatron_branch.state.placement import Placement
from megatron_branch.tree.build import build_trees
from tests.branching import prompt_with_tails


def test_reduction_in_every_pass_keeps_a_part_of_the_gradients() -> None:
    elements = [12, 5]
    held = {}
    for stage in (2, 3):
        for reduce in ("step", "pass"):
            values = {"model": {"path": "m"}, "data": {"rollouts": "r"}, "zero": {"stage": stage, "reduce": reduce}}
            held[stage, reduce] = held_by_model(make_config(values), elements, ranks=4, zero=stage)
    assert [held[stage, "step"].gradients for stage in (2, 3)] == [4 * 17, 4 * 17]
    assert [held[stage, "pass"].gradients for stage in (2, 3)] == [4 * (3 + 2), 0]  # with ZeRO 3 in DeepSpeed's buffer
    assert held[3, "pass"].optimizer == held[3, "step"].optimizer + (4 - 2) * (3 + 2)


def pass_bytes(*, sequence_parallel: bool, recompute_layers: bool) -> int:
    """Live activations of the largest pass on a tensor-parallel rank."""
    config = make_config(
        {
            "model": {"path": "m", "dtype": "bfloat16"},
            "data": {"rollouts": "r"},
            "parallel": {"tp": 4, "sequence_parallel": sequence_parallel},
            "branch": {"gate": False, "recompute_layers": recompute_layers},
        }
    )
    sizes = {"layers": 4, "hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab": 512}
    arch = architecture_from_config(random_source(**sizes).config, source="random")
    rollouts = prompt_with_tails(64, [16, 16])
    trees = build_trees(rollouts, share=True)
    plan = make_plan(
        trees, rollouts, config=config.branch, layout=Layout(), aggregation="token-mean", shape=arch.shape()
    )
    estimate = Estimate(config, arch, busiest_rank(plan, trees, rollouts, pp=1), placement=Placement())
    return estimate.rank_bytes(0, zero=1).device["activations of a pass"]


@pytest.mark.parametrize("recompute_layers", [False, True])
def test_sequence_parallel_divides_activations_by_the_ranks_at_most(recompute_layers: bool) -> None:
    whole, split = (pass_bytes(sequence_parallel=sp, recompute_layers=recompute_layers) for sp in (False, True))
    assert whole / 4 < split < whole
