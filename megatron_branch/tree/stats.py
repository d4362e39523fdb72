"""How much a step shares.

Always true:
- `tree_tokens <= logical_tokens`, with equality exactly when no input is shared;
- all counts are of inputs, so a rollout of L tokens counts L - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.node import Tree


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Statistics of the trees of one step.

    Attributes:
        rollouts: number of rollouts.
        groups: number of groups.
        trees: number of trees.
        nodes: number of nodes.
        depth: most nodes on a root-to-leaf path.
        logical_tokens: inputs that dense training computes.
        tree_tokens: inputs of all nodes, each once.
        shared_tokens: those of them that several rollouts read.
        trained_tokens: trained tokens over all rollouts.
        tails_per_tree: mean number of leaves.
        prompt_mean: mean number of tokens before the first trained one.
        response_mean: mean number of tokens from there on.
        longest: tokens of the longest rollout.
    """

    rollouts: int
    groups: int
    trees: int
    nodes: int
    depth: int
    logical_tokens: int
    tree_tokens: int
    shared_tokens: int
    trained_tokens: int
    tails_per_tree: float
    prompt_mean: float
    response_mean: float
    longest: int

    @property
    def token_ratio(self) -> float:
        """Computed share of the dense inputs, `tree_tokens / logical_tokens`; 1 where nothing is shared."""
        return self.tree_tokens / self.logical_tokens if self.logical_tokens else 1.0

    def text(self) -> str:
        """A few lines for the console."""
        ratio = f"{100 * self.token_ratio:.1f} %, x{1 / self.token_ratio:.2f}"
        return (
            f"{self.rollouts} rollouts of {self.groups} groups in {self.trees} trees: {self.nodes} nodes, "
            f"depth {self.depth}, {self.tails_per_tree:.1f} tails per tree\n"
            f"inputs: dense {self.logical_tokens:,}, in trees {self.tree_tokens:,} ({ratio}), "
            f"shared {self.shared_tokens:,}; trained tokens {self.trained_tokens:,}\n"
            f"tokens: prompt {self.prompt_mean:.1f}, response {self.response_mean:.1f} on average, "
            f"longest rollout {self.longest:,}"
        )


def tree_stats(trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> TreeStats:
    """Count what the trees of a step share.

    Args:
        trees: the result of `build_trees`.
        rollouts: what it was built from, at least one.
    """
    assert rollouts, "a step holds at least one rollout"
    nodes = [node for tree in trees for node in tree.nodes]
    prompt = sum(rollout.prompt_length for rollout in rollouts)
    total = sum(len(rollout) for rollout in rollouts)
    return TreeStats(
        rollouts=len(rollouts),
        groups=len({rollout.group_id for rollout in rollouts}),
        trees=len(trees),
        nodes=len(nodes),
        depth=max(_depth(tree) for tree in trees),
        logical_tokens=total - len(rollouts),
        tree_tokens=sum(node.inputs for node in nodes),
        shared_tokens=sum(node.inputs for node in nodes if node.multiplicity > 1),
        trained_tokens=sum(rollout.trained_tokens for rollout in rollouts),
        tails_per_tree=sum(not node.children for node in nodes) / len(trees),
        prompt_mean=prompt / len(rollouts),
        response_mean=(total - prompt) / len(rollouts),
        longest=max(len(rollout) for rollout in rollouts),
    )


def _depth(tree: Tree) -> int:
    """Most nodes on a root-to-leaf path."""
    depth: list[int] = []
    for node in tree.nodes:
        depth.append(1 if node.parent < 0 else depth[node.parent] + 1)
    return max(depth)
