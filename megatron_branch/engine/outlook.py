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
from megatron_branch.state.bytes import KINDS
from megatron_branch.state.predict import predict_state
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


def fullest_rank(config: Config, arch: Architecture, plan: Plan, *, device: str) -> dict[str, int]:
    """Predicted peak bytes of the state by kind, on the rank whose sum is largest.

    Walks every rank's order, so it is for headers and dry runs, not for every step.
    """
    sizes = config.parallel
    largest: tuple[int, dict[str, int]] = (0, dict.fromkeys(KINDS, 0))
    stages = stage_sizes(config, arch, device=device)
    for number, rank in enumerate(plan.ranks):
        for order, per_token in zip(training_orders(plan, number, sizes.pp), stages, strict=True):
            for cp_rank in range(sizes.cp):
                count = predict_state(
                    order,
                    rank.units,
                    per_token,
                    cp=sizes.cp,
                    cp_rank=cp_rank,
                    ulysses=sizes.ulysses,
                    sequence_parallel=sizes.sequence_ranks,
                )
                if count.peak_total > largest[0]:
                    largest = (count.peak_total, dict(count.peak))
    return largest[1]
