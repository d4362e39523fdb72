"""What a step will do, before it runs: statistics, schedule, bytes, FLOPs. For headers, metrics and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture
from megatron_branch.engine.config import ParallelConfig
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.plan.cost import PlanFlops, plan_flops, unit_flops
from megatron_branch.plan.plan import Plan
from megatron_branch.rollouts.record import Rollout
from megatron_branch.schedule.durations import token_durations
from megatron_branch.schedule.orders import training_orders
from megatron_branch.schedule.render import ascii_timeline, picture, text
from megatron_branch.schedule.simulate import Simulation, simulate
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.choose import choose_placement
from megatron_branch.state.placement import Placement
from megatron_branch.state.predict import Seat, predict_state
from megatron_branch.tree.node import Tree
from megatron_branch.tree.stats import TreeStats, tree_stats


@dataclass(frozen=True)
class Outlook:
    """A planned step described.

    Attributes:
        topology: parallel sizes, ZeRO stage and devices in one line.
        stats: of the trees.
        plan: the step.
        flops: dense, executed by training, and their ratio.
        executed_flops: those of a scoring pass included.
        orders: per stage, of the data-parallel rank with the most work.
        simulation: of those orders.
        busiest: that rank.
    """

    topology: str
    stats: TreeStats
    plan: Plan
    flops: PlanFlops
    executed_flops: float
    orders: tuple[str, ...]
    simulation: Simulation
    busiest: int

    @property
    def trees(self) -> str:
        """Statistics as text."""
        return self.stats.text()

    def metrics(self) -> dict[str, float]:
        """The `branch/` metrics that the plan alone determines."""
        return {
            "branch/tree_token_ratio": self.plan.logical_tokens / max(self.plan.executed_tokens, 1),
            "branch/shared_tokens": float(self.plan.logical_tokens - self.plan.executed_tokens),
            "branch/tails_per_tree": self.stats.tails_per_tree,
            "branch/bubble_fraction": self.simulation.bubble_fraction,
            "branch/speedup_bound": self.flops.bound,
            "branch/dense_trees": float(self.plan.dense_trees),
        }

    def picture(self, path: Path) -> None:
        """Draw the simulated schedule (needs the extra `plot`)."""
        picture(self.simulation, path, title=f"simulated schedule, data-parallel rank {self.busiest}")

    def timeline(self, width: int) -> str:
        """The simulated schedule in characters."""
        return ascii_timeline(self.simulation, width)


def outlook(
    config: Config,
    arch: Architecture,
    plan: Plan,
    trees: Sequence[Tree],
    rollouts: Sequence[Rollout],
    *,
    world_size: int,
    device: str,
) -> Outlook:
    """Describe a planned step; the same on every rank."""
    sizes = config.parallel
    dp = sizes.data_parallel(world_size)
    flops = plan_flops(plan, trees, arch.shape())
    scoring = 0.0
    if config.objective.old_logprobs == "recompute":
        scoring = sum(unit_flops(u, arch.shape(), phase="score") for rank in plan.ranks for u in rank.units)
        scoring += plan.loss_tokens * arch.shape().head_flops
    busiest = max(range(dp), key=lambda rank: sum(unit.tokens for unit in plan.ranks[rank].units))
    units = plan.ranks[busiest].units
    orders = training_orders(plan, busiest, sizes.pp)
    duration = token_durations(units, recompute_layers=plan.recompute_layers)
    return Outlook(
        topology=(
            f"{world_size} {device} ranks: {_tp_and_cp(sizes)}, pp {sizes.pp}, dp {dp}; "
            f"ZeRO {config.zero.stage}, {config.model.dtype}, gradient {plan.gradient}"
        ),
        stats=tree_stats(trees, rollouts),
        plan=plan,
        flops=flops,
        executed_flops=flops.executed + scoring,
        orders=tuple(text(order, units) for order in orders),
        simulation=simulate(orders, units, duration=duration),
        busiest=busiest,
    )


def _tp_and_cp(sizes: ParallelConfig) -> str:
    """Sizes, and how they are used where that is not the default."""
    text = f"tp {sizes.tp}" + (" (sequence parallel)" if sizes.sequence_parallel else "") + f", cp {sizes.cp}"
    if sizes.ulysses > 1:
        outer = f" x pass-Q {sizes.cp // sizes.ulysses}" if sizes.ulysses < sizes.cp else ""
        text += f" (Ulysses {sizes.ulysses}{outer})"
    return text


@dataclass(frozen=True)
class RankBytes:
    """Predicted bytes of the state on one rank, under its placement."""

    count: ByteCount
    placement: Placement


def fullest_rank(
    config: Config, arch: Architecture, plan: Plan, *, device: str, host_room_bytes: int | None = None
) -> RankBytes:
    """The rank whose sum of bytes at their peak is largest.

    Walks every rank's order, so it is for headers and dry runs, not for every step.

    Args:
        host_room_bytes: see `choose_placement`.

    Raises:
        ValueError: `state.device_budget_bytes` is too small for some rank.
    """
    sizes = config.parallel
    largest: RankBytes | None = None
    stages = stage_sizes(config, arch, device=device)
    for number, rank in enumerate(plan.ranks):
        for order, per_token in zip(training_orders(plan, number, sizes.pp), stages, strict=True):
            for cp_rank in range(sizes.cp):
                # The first of the tensor-parallel ranks keeps as many rows as any.
                seat = Seat(sizes.cp, cp_rank, ulysses=sizes.ulysses)
                placement = choose_placement(
                    config.state, order, rank.units, per_token, seat=seat, host_room_bytes=host_room_bytes
                )
                count = predict_state(order, rank.units, per_token, seat=seat, placement=placement)
                if largest is None or count.peak_total > largest.count.peak_total:
                    largest = RankBytes(count, placement)
    assert largest is not None, "a plan has ranks"
    return largest
