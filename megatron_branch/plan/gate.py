"""Which trees are worth sharing; the rollouts of the others run alone.

Sharing saves the prefix of all rollouts but one, and costs its replay and the passes of its own. Both sides are counted
in FLOPs (`plan/cost.py`), plus what a pass costs beside its tokens: launches, norms, collectives, the reading of the
weights. That part is written as tokens: a forward takes as long as if it had `PASS_TOKENS` tokens more, a backward
twice that. Measured on one core (float32, 4 layers, hidden 256, forward and backward), a pass took 15 ms and 0.385 ms
a token: 39 tokens; two threads halve the second. On a GPU, an assumed 0.3 ms per layer against the products of an 8B
model make some 80 tokens on an H20 and 500 on an H100. 64 stands between them.

A tree is shared when that saves at least `LEAST_SAVING`: the counts are no better, and what gains less may lose.

Always true:
- the decision depends on the plan's own arguments, so all ranks take the same one;
- only `exact` is gated: a rollout alone has the same gradient there, and another one in `detached`;
- a tree with a rollout that does not fit one pass stays shared: alone, it would be cut and replayed just the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_branch.plan.activations import ActivationSizes, with_retained
from megatron_branch.plan.cost import LINEAR_BACKWARD, ModelShape, training_flops
from megatron_branch.plan.limits import BranchConfig, Layout
from megatron_branch.plan.pack import TreeUnits, tree_units
from megatron_branch.plan.plan import Unit
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.node import Node, Tree

PASS_TOKENS = 64
LEAST_SAVING = 0.03


def gate_trees(
    trees: Sequence[Tree],
    rollouts: Sequence[Rollout],
    *,
    config: BranchConfig,
    layout: Layout,
    shape: ModelShape,
    sizes: Sequence[ActivationSizes] = (),
) -> tuple[Tree, ...]:
    """The trees to plan: those worth sharing as they are, and each rollout of the others in a tree of its own.

    Args:
        trees: all trees of the step.
        rollouts: all rollouts of the step.
        config: gradient mode, limits, and whether to gate at all.
        layout, shape, sizes: see `make_plan`.

    Returns:
        The trees in the order of their first rollout, numbered anew.
    """
    if not config.gate or config.gradient != "exact":
        return tuple(trees)

    def units(tree: Tree) -> TreeUnits:
        planned = tree_units(tree, rollouts, config)
        return replace(planned, units=with_retained(planned.units, config, sizes, cp=layout.cp))

    kept: list[Tree] = []
    for tree in trees:
        alone = [_alone(tree, rollout, len(rollouts[rollout])) for rollout in tree.rollouts]
        apart = [units(some) for some in alone]
        one_pass_each = all(len(planned.units) <= 1 for planned in apart)
        if len(alone) > 1 and one_pass_each and not _pays(units(tree), apart, shape, config):
            kept += alone
        else:
            kept.append(tree)
    kept.sort(key=lambda tree: tree.rollouts[0])
    return tuple(replace(tree, index=index) for index, tree in enumerate(kept))


def _alone(tree: Tree, rollout: int, tokens: int) -> Tree:
    """A rollout in a tree of one node."""
    node = Node(index=0, parent=-1, start=0, end=tokens, rollouts=(rollout,), children=())
    return Tree(index=0, nodes=(node,), rollouts=(rollout,), taken_from=tree.index)


def _pays(shared: TreeUnits, apart: Sequence[TreeUnits], shape: ModelShape, config: BranchConfig) -> bool:
    """Whether sharing saves enough."""
    dense = sum(_cost(planned, shape, config) for planned in apart)
    return _cost(shared, shape, config) <= (1 - LEAST_SAVING) * dense


def _cost(planned: TreeUnits, shape: ModelShape, config: BranchConfig) -> float:
    """FLOPs of all passes, with what they cost beside their tokens."""
    layers = config.recompute_layers
    flops = sum(
        training_flops(unit, shape, rows=rows, recompute_layers=layers)
        for unit, rows in zip(planned.units, planned.loss_rows, strict=True)
    )
    return flops + PASS_TOKENS * shape.linear_flops * sum(_forwards(unit, config) for unit in planned.units)


def _forwards(unit: Unit, config: BranchConfig) -> float:
    """The passes of a unit, counted in forwards."""
    once = 1 + LINEAR_BACKWARD + (1 if config.recompute_layers and not unit.retained else 0)
    if unit.kind == "tail":
        return once
    if not unit.replayed:
        return 1
    return 1 + (LINEAR_BACKWARD if unit.retained else once)
