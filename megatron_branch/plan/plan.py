"""Where every token goes: the frozen result of planning one optimizer step.

A *unit* is what one pass of the model computes: one chunk of a prefix, or a pack of sibling tails. A unit reads the
state of its `context` (the prefix units on its root-to-leaf path) and its own tokens; segments of one unit never see
each other. The plan holds the units of every data-parallel rank, because all ranks build the same plan.

Always true (`rules.assert_always_true`):
- each input of each node of each tree is in exactly one segment of exactly one unit of exactly one rank;
- `context` lists earlier prefix units of the same tree, in path order, covering positions 0 .. segment start;
- units of a rank stand in depth-first order, so a unit stands after its context, and trees do not interleave;
- the weights of all trained tokens follow the aggregation mode over the whole step, whatever the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnitKind = Literal["prefix", "tail"]
Gradient = Literal["exact", "detached", "dense"]
Activations = Literal["recompute", "retain", "auto"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Inputs `x[start..end)` of one node; the input at position p predicts the token at p + 1."""

    node: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Unit:
    """One pass.

    Attributes:
        index: place in its rank's `units`.
        tree: index of the tree in the step.
        label: `node.chunk` for a prefix, `parent.pack` for a tail; what the printed schedule shows.
        kind: `prefix` is captured, read by later units and replayed; `tail` is forwarded and backpropagated at once.
        segments: one for a prefix; several sibling leaves for a packed tail.
        context: indices of the prefix units it reads, root first.
        trained: some rollout trains one of its targets.
        replayed: (prefix only) a gradient flows through it: always in exact mode; in detached mode only where it or a
            prefix before it on the path carries loss.
        retained_bytes: (replayed only) what its capture's graph keeps until the replay, on the fullest rank; 0: it has
            no graph, its replay runs forward again.
    """

    index: int
    tree: int
    label: str
    kind: UnitKind
    segments: tuple[Segment, ...]
    context: tuple[int, ...]
    trained: bool
    replayed: bool
    retained_bytes: int = 0

    @property
    def retained(self) -> bool:
        """Its capture runs with autograd, and its replay is a backward alone."""
        return self.retained_bytes > 0

    @property
    def tokens(self) -> int:
        """Number of inputs, padding not counted."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def context_tokens(self) -> int:
        """Number of state positions that it reads: its segments all start where its context ends."""
        return self.segments[0].start


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The work of one data-parallel rank."""

    trees: tuple[int, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The step.

    Attributes:
        gradient: which gradient is computed.
        activations: which captured chunks keep their graph.
        recompute_layers: tails, and replays that run forward again, keep one hidden state per layer and compute each
            layer again in their backward.
        aggregation: how token losses become one number.
        ranks: one entry per data-parallel rank.
        row_weights: per rollout, the weight of each of its trained tokens in the loss (already divided by the step's
            denominator); nothing later divides or multiplies.
        rows: number of rollouts in the step.
        trained_tokens: trained tokens over all rollouts.
        logical_tokens: inputs that dense training computes.
        executed_tokens: inputs that the forward passes of this plan compute once each.
        loss_tokens: positions at which the head runs.
        dense_trees: trees whose rollouts run alone, because sharing would not pay (`plan/gate.py`).
    """

    gradient: Gradient
    activations: Activations
    recompute_layers: bool
    aggregation: Aggregation
    ranks: tuple[RankPlan, ...]
    row_weights: tuple[float, ...]
    rows: int
    trained_tokens: int
    logical_tokens: int
    executed_tokens: int
    loss_tokens: int
    dense_trees: int
