"""What can be checked before ranks meet, weights load or Megatron is imported."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture, architecture_from_config, check_layout
from megatron_branch.engine.convert import check_source
from megatron_branch.engine.hf_source import Source, open_source
from megatron_branch.engine.optimizers import check_optimizer
from megatron_branch.rollouts.groups import RolloutGroups, plan_steps, read_groups
from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout

Steps = list[list[Rollout]]


@dataclass(frozen=True)
class Checked:
    """A model folder whose settings and tensors were checked, before any weight is read."""

    source: Source
    arch: Architecture


def check_model(config: Config) -> Checked:
    """Open the model folder and check it against the layout.

    Raises:
        ValueError: the folder, a setting or the layout cannot be used; the message says what to change.
    """
    source = open_source(config.model.path, config.model.gguf_file)
    arch = architecture_from_config(source.config, source=str(source))
    check_layout(arch, tp=config.parallel.tp, pp=config.parallel.pp)
    check_source(source, arch)
    return Checked(source, arch)


def check_world_size(config: Config, world_size: int) -> None:
    """Raise ValueError with the numbers and the way out unless the parallel sizes multiply to the number of ranks."""
    sizes = config.parallel
    dp = sizes.data_parallel(world_size)
    rest = sizes.cp * sizes.tp * sizes.pp
    if dp * rest == world_size:
        return
    remedy = f"launch {dp * rest} ranks"
    if world_size % rest == 0:
        remedy = f"set parallel.dp={world_size // rest} or {remedy}"
    raise ValueError(
        f"parallel sizes dp={dp} pp={sizes.pp} cp={sizes.cp} tp={sizes.tp} multiply to {dp * rest}, but the launcher "
        f"started {world_size} ranks; {remedy}"
    )


def check_rows(config: Config, arch: Architecture) -> None:
    """Read every row of the rollouts file once.

    Raises:
        ValueError: see `read_rollouts`.
    """
    for _ in read_rollouts(config.data.rollouts, vocab_size=arch.vocab):
        pass


def check_run(config: Config, *, world_size: int) -> tuple[Checked, Steps]:
    """Everything that can be refused before ranks meet; the rollouts of every optimizer step.

    Raises:
        ValueError: layout, optimizer, model folder, a row, or the number of steps; the message says what to change.
    """
    check_world_size(config, world_size)
    check_optimizer(config.optimizer)
    checked = check_model(config)
    return checked, all_steps(read_groups(config.data, vocab_size=checked.arch.vocab), config)


def all_steps(groups: RolloutGroups, config: Config) -> Steps:
    """The rollouts of every optimizer step of the run.

    Raises:
        ValueError: the data gives fewer steps than asked for, or a step would train nothing.
    """
    steps: Steps = []
    for epoch in range(config.data.epochs):
        steps += plan_steps(groups.groups, config.data, epoch)
    if config.steps is not None and config.steps > len(steps):
        raise ValueError(
            f"steps={config.steps}, but {config.data.rollouts} gives {len(steps)} steps: {len(groups.groups)} groups, "
            f"data.groups_per_step={config.data.groups_per_step}, data.epochs={config.data.epochs}; "
            "lower steps or groups_per_step, or raise epochs"
        )
    steps = steps[: config.steps]
    for number, rollouts in enumerate(steps, 1):
        if not any(rollout.trained_tokens for rollout in rollouts):
            names = ", ".join(sorted({rollout.group_id for rollout in rollouts})[:4])
            raise ValueError(
                f"step {number} (groups {names}) trains no token: every loss mask is 0; "
                "give the rows a loss mask, remove the groups, or raise data.groups_per_step"
            )
        check_reference(rollouts, config)
    return steps


def check_reference(rollouts: list[Rollout], config: Config) -> None:
    """Raise ValueError when a KL penalty is asked for and a row has no reference log-probs."""
    if config.objective.kl_coefficient == 0:
        return
    for rollout in rollouts:
        if rollout.ref_logprobs is None:
            raise ValueError(
                f"{rollout.source}: ref_logprobs is missing, but objective.kl_coefficient="
                f"{config.objective.kl_coefficient} needs the reference policy's log-probs; "
                "add them or set objective.kl_coefficient=0"
            )
