"""FLOPs, counted here and nowhere else.

Forward of the linear layers: 2 FLOPs per weight and token (qkv, attention output, gated MLP with three matrices).
Attention: two matrix products per causal (query, key) pair. Head: on trained positions only. Backward: 2x the forward
for linear layers and head, 2.5x for attention (it computes the scores again). The replay of a retained unit is a
backward alone; a pass that recomputes its layers adds one forward without head. Embedding, norms and rotary positions
are left out.

Always true:
- an unpacked pass and a packed pass of the same segments count the same;
- a chunked prefix counts the same as an unchunked one;
- `executed` is the sum of `by_phase`, and `bound = dense / executed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_branch.plan.plan import Plan, Unit
from megatron_branch.tree.node import Tree

UnitPhase = Literal["capture", "tail", "replay", "score"]
LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder; `ffn` is the width of the gated MLP, `vocab` the unpadded vocabulary."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linear_flops(self) -> int:
        """Forward FLOPs per token of the linear layers of the whole decoder."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2 * self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs per (query, key) pair of the whole decoder."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def head_flops(self) -> int:
        """Forward FLOPs of the head per position."""
        return 2 * self.hidden * self.vocab


@dataclass(frozen=True, slots=True)
class PlanFlops:
    """FLOPs of one step over all ranks.

    Attributes:
        dense: dense training of the same rollouts without recomputation, head on trained positions.
        executed: what the plan runs.
        bound: `dense / executed`, the largest speed-up that the plan allows.
        by_phase: FLOPs of `capture`, `tail`, `replay` (without head) and `head`.
    """

    dense: float
    executed: float
    bound: float
    by_phase: dict[str, float]


class PassFlops(NamedTuple):
    """FLOPs of one pass: of linear layers, of attention, of the head."""

    linear: float
    attention: float
    head: float


def causal_pairs(tokens: int, context: int = 0) -> int:
    """Number of (query, key) pairs of `tokens` queries that see `context` keys and, causally, each other."""
    return tokens * context + tokens * (tokens + 1) // 2


def unit_pairs(unit: Unit) -> int:
    """Number of (query, key) pairs of a unit; segments do not see each other."""
    return sum(causal_pairs(segment.tokens, segment.start) for segment in unit.segments)


def pass_flops(
    unit: Unit, shape: ModelShape, *, phase: UnitPhase, rows: int = 0, recompute_layers: bool = False
) -> PassFlops:
    """FLOPs of one pass of one unit, by what computes them.

    Args:
        unit: the unit.
        shape: sizes of the model.
        phase: `capture` forward without head, with it where the unit is retained; `score` forward with head; `tail`
            and `replay` forward and backward, the replay of a retained unit backward alone.
        rows: positions at which the head runs (0 leaves the head out).
        recompute_layers: a tail, and a replay with a forward, runs its layers forward once more.
    """
    forward = 0 if phase == "replay" and unit.retained else 1
    backward = int(phase in ("tail", "replay"))
    layers = forward + (forward * backward if recompute_layers else 0)
    heads = 0 if phase == "capture" and not unit.retained else forward
    return PassFlops(
        linear=unit.tokens * shape.linear_flops * (layers + backward * LINEAR_BACKWARD),
        attention=unit_pairs(unit) * shape.pair_flops * (layers + backward * ATTENTION_BACKWARD),
        head=rows * shape.head_flops * (heads + backward * LINEAR_BACKWARD),
    )


def unit_flops(
    unit: Unit, shape: ModelShape, *, phase: UnitPhase, rows: int = 0, recompute_layers: bool = False
) -> float:
    """All FLOPs of one pass of one unit; arguments as of `pass_flops`."""
    return sum(pass_flops(unit, shape, phase=phase, rows=rows, recompute_layers=recompute_layers))


def training_flops(unit: Unit, shape: ModelShape, *, rows: int = 0, recompute_layers: bool = False) -> float:
    """FLOPs of all passes of one unit in a training step."""
    phases: tuple[UnitPhase, ...] = ("tail",)
    if unit.kind == "prefix":
        phases = ("capture", "replay") if unit.replayed else ("capture",)
    return sum(unit_flops(unit, shape, phase=phase, rows=rows, recompute_layers=recompute_layers) for phase in phases)


def rollout_inputs(trees: Sequence[Tree]) -> dict[int, int]:
    """Number of inputs of dense training per rollout, read off the node where each rollout ends."""
    inputs: dict[int, int] = {}
    for tree in trees:
        for node in tree.nodes:
            for rollout in node.rollouts:
                inputs[rollout] = max(inputs.get(rollout, 0), node.input_end)
    return inputs


def dense_flops(plan: Plan, trees: Sequence[Tree], shape: ModelShape) -> float:
    """FLOPs of dense training of the step's rollouts, without recomputation."""
    pairs = sum(causal_pairs(inputs) for inputs in rollout_inputs(trees).values())
    linear = plan.logical_tokens * shape.linear_flops + plan.trained_tokens * shape.head_flops
    return linear * (1 + LINEAR_BACKWARD) + pairs * shape.pair_flops * (1 + ATTENTION_BACKWARD)


def plan_flops(plan: Plan, trees: Sequence[Tree], shape: ModelShape) -> PlanFlops:
    """FLOPs of one training step and the bound that they set on the speed-up over dense training."""
    by_phase = {"capture": 0.0, "tail": 0.0, "replay": 0.0}
    for rank in plan.ranks:
        for unit in rank.units:
            again = plan.recompute_layers
            if unit.kind == "tail":
                by_phase["tail"] += unit_flops(unit, shape, phase="tail", recompute_layers=again)
                continue
            by_phase["capture"] += unit_flops(unit, shape, phase="capture")
            if unit.replayed:
                by_phase["replay"] += unit_flops(unit, shape, phase="replay", recompute_layers=again)
    by_phase["head"] = plan.loss_tokens * shape.head_flops * (1 + LINEAR_BACKWARD)
    dense = dense_flops(plan, trees, shape)
    executed = sum(by_phase.values())
    return PlanFlops(dense=dense, executed=executed, bound=dense / executed, by_phase=by_phase)
