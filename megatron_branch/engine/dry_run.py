"""What a run would do, without ranks, weights or GPUs."""

from __future__ import annotations

from megatron_branch.config import Config
from megatron_branch.engine.checked import check_run
from megatron_branch.engine.estimate import held_by_model
from megatron_branch.engine.outlook import fullest_rank, outlook
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.engine.tensor_layout import stage_elements
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.limits import Layout
from megatron_branch.tracking.console import bytes_text
from megatron_branch.tree.build import build_trees

WIDTH = 100
PLANNED = "planned"


def dry_run(config: Config, *, world_size: int | None) -> str:
    """Tree statistics, schedule and predicted state bytes of the first step, as text.

    Args:
        world_size: ranks to plan for; None: the smallest number that the sizes allow.

    Raises:
        ValueError: as a run would.
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"--world_size={world_size}: must be at least 1; leave it out for the fewest ranks that do")
    sizes = config.parallel
    ranks = world_size or sizes.cp * sizes.tp * sizes.pp * (sizes.dp or 1)
    checked, data = check_run(config, world_size=ranks)
    rollouts = data.steps[0]
    dp = sizes.data_parallel(ranks)
    layout = Layout(dp, sizes.cp, sizes.pp, config.zero.matched(dp))
    trees = build_trees(rollouts, share=config.branch.gradient != "dense")
    shape = checked.arch.shape()
    retained = [stage.activations for stage in stage_sizes(config, checked.arch, device=PLANNED)]
    trees = gate_trees(trees, rollouts, config=config.branch, layout=layout, shape=shape, sizes=retained)
    plan = make_plan(
        trees,
        rollouts,
        config=config.branch,
        layout=layout,
        aggregation=config.objective.aggregation,
        shape=shape,
        sizes=retained,
    )
    view = outlook(config, checked.arch, plan, trees, rollouts, world_size=ranks, device=PLANNED)
    lines = [f"topology  {view.topology}", "trees     " + view.trees.replace("\n", "\n" + " " * 10)]
    if data.left_out:
        lines.append(f"data      {data.left_out}")
    lines += [f"stage {stage}   {order}" for stage, order in enumerate(view.orders)]
    lines.append(view.timeline(WIDTH))
    lines.append(
        f"bubble {100 * view.simulation.bubble_fraction:.1f} %, speed-up bound by FLOPs x{view.flops.bound:.2f}; "
        f"steps in all: {len(data.steps)}"
    )
    if plan.dense_trees:
        lines.append(f"trees whose rollouts run alone, because sharing would not pay: {plan.dense_trees}")
    shards = stage_elements(checked.arch, tp=sizes.tp, pp=sizes.pp)
    held = max(
        (held_by_model(config, shard, ranks=dp * sizes.cp, zero=config.zero.stage) for shard in shards),
        key=lambda model: model.in_passes,
    )
    kinds = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
    lines.append("model on the fullest rank: " + ", ".join(f"{k} {bytes_text(size)}" for k, size in kinds.items()))
    fullest = fullest_rank(config, checked.arch, plan, device=PLANNED)
    by_kind, by_place = (
        ", ".join(f"{name} {bytes_text(size)}" for name, size in peaks.items())
        for peaks in (fullest.count.peak, fullest.count.peak_at)
    )
    lines.append(
        f"state on the fullest rank, peak by kind: {by_kind}; by place: {by_place}; placement: {fullest.placement}"
    )
    return "\n".join(lines)
