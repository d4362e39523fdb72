"""Builds the plan of one optimizer step: units per tree, trees per data-parallel rank, weights per row.

Always true:
- the plan depends on nothing but its arguments, so all ranks build the same one;
- a tree stays whole on one rank; the trees of a rank stand in the order of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from megatron_branch.plan.activations import ActivationSizes, with_retained
from megatron_branch.plan.cost import ModelShape, training_flops
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.pack import TreeUnits, tree_units
from megatron_branch.plan.plan import Aggregation, Plan, RankPlan, Unit
from megatron_branch.plan.weights import row_weights
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.node import Tree


def make_plan(
    trees: Sequence[Tree],
    rollouts: Sequence[Rollout],
    *,
    config: BranchConfig,
    layout: Layout,
    aggregation: Aggregation,
    shape: ModelShape,
    sizes: Sequence[ActivationSizes] = (),
) -> Plan:
    """Plan one step.

    Args:
        trees: all trees of the step, `trees[i].index == i`; for `gradient: dense` built without sharing.
        rollouts: all rollouts of the step, over all ranks.
        config: gradient mode and limits of a pass.
        layout: mesh axes.
        aggregation: how token losses become one number.
        shape: sizes of the model, for the predicted cost of a tree.
        sizes: bytes of retained graphs, per pipeline stage; not needed to recompute.

    Raises:
        ValueError: no rollout trains a token.
    """
    weights = row_weights(rollouts, aggregation)
    per_tree = [_retained(tree_units(tree, rollouts, config), config, sizes, layout) for tree in trees]
    costs = [_tree_cost(planned, shape, config) for planned in per_tree]
    ranks = tuple(_rank_plan(indices, per_tree) for indices in _assign(costs, layout.dp))
    return Plan(
        gradient=config.gradient,
        activations=config.activations,
        recompute_layers=config.recompute_layers,
        aggregation=aggregation,
        ranks=ranks,
        row_weights=weights,
        rows=len(rollouts),
        trained_tokens=sum(rollout.trained_tokens for rollout in rollouts),
        logical_tokens=sum(len(rollout) - 1 for rollout in rollouts),
        executed_tokens=sum(unit.tokens for rank in ranks for unit in rank.units),
        loss_tokens=sum(sum(planned.loss_rows) for planned in per_tree),
        dense_trees=len({tree.taken_from for tree in trees if tree.taken_from is not None}),
    )


def _retained(planned: TreeUnits, config: BranchConfig, sizes: Sequence[ActivationSizes], layout: Layout) -> TreeUnits:
    return replace(planned, units=with_retained(planned.units, config, sizes, cp=layout.cp))


def _tree_cost(planned: TreeUnits, shape: ModelShape, config: BranchConfig) -> float:
    pairs = zip(planned.units, planned.loss_rows, strict=True)
    layers = config.recompute_layers
    return sum(training_flops(unit, shape, rows=rows, recompute_layers=layers) for unit, rows in pairs)


def _assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Longest processing time first: trees by falling cost, each to the least loaded rank, ties to the lower index.

    Trees without work go to no rank.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for tree in sorted(range(len(costs)), key=lambda tree: (-costs[tree], tree)):
        if costs[tree] > 0:
            load, rank = heapq.heappop(loads)
            assigned[rank].append(tree)
            heapq.heappush(loads, (load + costs[tree], rank))
    return [sorted(indices) for indices in assigned]


def _rank_plan(indices: Sequence[int], per_tree: Sequence[TreeUnits]) -> RankPlan:
    """Number the units of a rank through."""
    units: list[Unit] = []
    for tree in indices:
        base = len(units)
        for unit in per_tree[tree].units:
            context = tuple(base + earlier for earlier in unit.context)
            units.append(replace(unit, index=base + unit.index, context=context))
    return RankPlan(trees=tuple(indices), units=tuple(units))
