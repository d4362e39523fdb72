"""Trees of rollouts: who shares which tokens.

A node owns the tokens `x[start..end)` of every rollout that passes through it. It is fed the inputs `x[start-1..end-1)`
(the root: `x[0..end-1)`) and predicts exactly its own tokens, so the fork token is run again by each child and no node
reads another node's output.

Always true:
- nodes stand in depth-first order, parents before children, the root first;
- a node is maximal: its parent passes a different set of rollouts;
- the inputs along every root-to-leaf path are the positions 0, 1, 2, ... without gap or overlap;
- `sum(multiplicity * inputs)` over the nodes is the number of inputs of dense training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A maximal run of tokens with one set of rollouts.

    Attributes:
        index: place in `Tree.nodes`.
        parent: index of the parent, -1 for the root.
        start: position of its first own token.
        end: position after its last own token.
        rollouts: indices (into the step's rollouts) of those that pass through, ascending.
        children: indices of the children, in order of their first rollout.
    """

    index: int
    parent: int
    start: int
    end: int
    rollouts: tuple[int, ...]
    children: tuple[int, ...]

    @property
    def multiplicity(self) -> int:
        """How many rollouts pass through."""
        return len(self.rollouts)

    @property
    def input_start(self) -> int:
        """Position of the first input; the input at position p predicts the token at p + 1."""
        return max(self.start - 1, 0)

    @property
    def input_end(self) -> int:
        """Position after the last input."""
        return self.end - 1

    @property
    def inputs(self) -> int:
        """Number of inputs; 0 for a one-token root."""
        return self.input_end - self.input_start


@dataclass(frozen=True, slots=True)
class Tree:
    """Rollouts merged on exact shared token prefixes.

    Attributes:
        index: place in the step.
        nodes: in depth-first order.
        rollouts: indices into the step's rollouts, ascending.
        taken_from: for a rollout that runs alone because sharing would not pay, the index that its shared tree had;
            None for every other tree.
    """

    index: int
    nodes: tuple[Node, ...]
    rollouts: tuple[int, ...]
    taken_from: int | None = None
