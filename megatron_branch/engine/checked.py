"""What can be checked before ranks meet, weights load or Megatron is imported."""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture, architecture_from_config, check_layout
from megatron_branch.engine.convert import check_source
from megatron_branch.engine.hf_source import Source, open_source
from megatron_branch.engine.optimizers import check_optimizer
from megatron_branch.engine.transformers_arch import transformers_architecture
from megatron_branch.rollouts.groups import RolloutGroups, plan_steps, read_groups
from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout

Steps = list[list[Rollout]]


@dataclass(frozen=True)
class Checked:
    """A model folder whose settings and tensors were checked, before any weight is read."""

    source: Source
    arch: Architecture


@dataclass(frozen=True)
class RunData:
    """What a run trains on.

    Attributes:
        steps: the rollouts of every optimizer step.
        read_s: seconds that reading them took.
        left_out: what the file holds beside them, as text; empty if nothing.
    """

    steps: Steps
    read_s: float = 0.0
    left_out: str = ""


def check_model(config: Config) -> Checked:
    """Open the model folder and check it against the layout.

    Raises:
        ValueError: the folder, a setting or the layout cannot be used; the message says what to change.
    """
    if config.model.host == "transformers":
        source = open_source(config.model.path, any_family=True)
        arch = transformers_architecture(source.config, source=str(source))
    else:
        source = open_source(config.model.path, config.model.gguf_file)
        arch = architecture_from_config(source.config, source=str(source))
    check_layout(arch, tp=config.parallel.tp, pp=config.parallel.pp, ulysses=config.parallel.ulysses)
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


def check_reduction(config: Config, world_size: int) -> None:
    """Raise ValueError unless gradients can be reduced when `zero.reduce` says."""
    zero, pp, dp = config.zero, config.parallel.pp, config.parallel.data_parallel(world_size)
    if zero.reduce == "step":
        return
    if zero.stage < 2:
        raise ValueError(
            f"zero.reduce=pass with zero.stage={zero.stage}: below stage 2 every rank holds whole gradients; "
            "set zero.stage to 2 or 3, or zero.reduce=step"
        )
    if pp > 1 and dp > 1:
        raise ValueError(
            f"zero.reduce=pass with parallel.pp={pp} and parallel.dp={dp}: gradients are summed over data-parallel "
            "ranks at the same pass, while pipeline stages run different passes at the same time; "
            "set zero.reduce=step, parallel.pp=1 or parallel.dp=1"
        )
    if config.branch.activations != "recompute" and dp > 1:
        raise ValueError(
            f"zero.reduce=pass with branch.activations={config.branch.activations} and parallel.dp={dp}: gradients are "
            "summed over data-parallel ranks at the same pass, and a replay that is a backward alone matches no pass "
            "of a rank with other work; set zero.reduce=step, branch.activations=recompute or parallel.dp=1"
        )


def check_rows(config: Config, arch: Architecture) -> None:
    """Read every row of the rollouts file once, as one step.

    Raises:
        ValueError: see `read_rollouts`; or no token is trained, or reference log-probs are missing.
    """
    trained = 0
    for rollout in read_rollouts(config.data.rollouts, vocab_size=arch.vocab):
        check_reference([rollout], config)
        trained += rollout.trained_tokens
    if not trained:
        raise ValueError(
            f"{config.data.rollouts}: no row trains a token, every loss mask is 0; give the rows a loss mask"
        )


def check_run_dir(config: Config) -> None:
    """Raise ValueError unless the run's folder can be written, as far as that shows without writing."""
    run_dir = config.tracking.run_dir.absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        raise ValueError(f"tracking.run_dir = {config.tracking.run_dir}: {existing} {reason}; choose another folder")
    checkpoints = run_dir / "checkpoints"
    if config.checkpoint.resume is None and any(checkpoints.glob("global_step_*")):
        raise ValueError(
            f"tracking.run_dir = {config.tracking.run_dir}: {checkpoints} holds another run's checkpoints; set "
            "checkpoint.resume=auto to go on with it, or choose another folder"
        )
    if config.tracking.plot_schedule and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "tracking.plot_schedule = true: matplotlib is not installed; "
            "install the extra `plot`, or set tracking.plot_schedule=false"
        )


def check_run(config: Config, *, world_size: int) -> tuple[Checked, RunData]:
    """Everything that can be refused before ranks meet; the rollouts of every optimizer step.

    Raises:
        ValueError: layout, optimizer, run folder, model folder, a row, or the number of steps; the message says what
            to change.
    """
    check_world_size(config, world_size)
    check_reduction(config, world_size)
    check_optimizer(config.optimizer)
    check_run_dir(config)
    checked = check_model(config)
    start = time.monotonic()
    groups = read_groups(config.data, vocab_size=checked.arch.vocab)
    steps = all_steps(groups, config)
    return checked, RunData(steps, time.monotonic() - start, _left_out(groups, config))


def _left_out(groups: RolloutGroups, config: Config) -> str:
    """What the file holds and no step trains; empty if nothing."""
    parts = []
    if groups.skipped_rows:
        rejected = f"{config.data.rollouts}.rejected.jsonl"
        parts.append(f"{_count(groups.skipped_rows, 'bad row')} left out, see {rejected}")
    if groups.dropped_groups:
        whole = f"{_count(groups.dropped_groups, 'group')} ({_count(groups.dropped_rows, 'row')})"
        parts.append(f"{whole} left out for a rollout longer than data.max_tokens={config.data.max_tokens}")
    return "; ".join(parts)


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
            f"steps={config.steps}, but {config.data.rollouts} gives {_count(len(steps), 'step')}: "
            f"{_count(len(groups.groups), 'group')}, data.groups_per_step={config.data.groups_per_step}, "
            f"data.epochs={config.data.epochs}; lower steps or groups_per_step, or raise epochs"
        )
    steps = steps[: config.steps]
    for number, rollouts in enumerate(steps, 1):
        if not any(rollout.trained_tokens for rollout in rollouts):
            names = ", ".join(sorted({rollout.group_id for rollout in rollouts})[:4])
            raise ValueError(
                f"{config.data.rollouts}: step {number} (groups {names}) trains no token, every loss mask is 0; "
                "give the rows a loss mask, remove the groups, or raise data.groups_per_step"
            )
        check_reference(rollouts, config)
    return steps


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
