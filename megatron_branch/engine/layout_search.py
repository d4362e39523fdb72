"""Search for the fastest layout of a step that fits a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from megatron_branch.config import Config, make_config
from megatron_branch.engine.architecture import Architecture, check_layout
from megatron_branch.engine.checked import check_reduction
from megatron_branch.engine.config import ZeroConfig
from megatron_branch.engine.estimate import BusiestRank, Estimate, RankBytes, StepSeconds, busiest_rank
from megatron_branch.engine.sizes import stage_sizes
from megatron_branch.plan.build import make_plan
from megatron_branch.plan.gate import gate_trees
from megatron_branch.plan.hardware import Assumptions, Hardware
from megatron_branch.plan.limits import Layout
from megatron_branch.rollouts.record import Rollout
from megatron_branch.state.bytes import ByteCount
from megatron_branch.state.choose import by_copies
from megatron_branch.state.placement import Placement
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Tree

CHUNKS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
BUDGET_STEP = 2**30
RETAIN_TRIES = 12
CLOSE = 1.01  # the assumptions are no better than that
ZEROS: tuple[dict[str, Any], ...] = (
    *({"stage": stage, "reduce": "step"} for stage in range(4)),
    *({"stage": stage, "reduce": "pass"} for stage in (2, 3)),
)
MOST_UNITS = 140  # of one tree: plans of more passes take long to look at


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rollouts of a step.

    Attributes:
        prompt: tokens that the rollouts of a group share.
        response: tokens of each rollout after them, all trained.
        rollouts: of each group.
        groups: of the step; they share nothing.
    """

    prompt: int
    response: int
    rollouts: int
    groups: int = 1

    def rows(self) -> list[Rollout]:
        """Made-up rollouts of this shape."""
        rows = []
        for group in range(self.groups):
            prompt = np.full(self.prompt, group, dtype=np.int64)
            mask = np.arange(self.prompt + self.response) >= self.prompt
            for index in range(self.rollouts):
                ids = np.concatenate([prompt, np.full(self.response, self.groups + index, dtype=np.int64)])
                rows.append(Rollout(str(group), f"{group}.{index}", ids, mask, self.prompt, reward=1.0))
        return rows


@dataclass(frozen=True)
class Machine:
    """Equal devices and what is assumed of them."""

    hardware: Hardware
    devices: int
    assumed: Assumptions = Assumptions()

    @property
    def room(self) -> dict[str, float]:
        """Bytes per rank that a run can have, by place."""
        sizes = {
            "device": self.hardware.memory_bytes,
            "host": self.hardware.host_bytes,
            "disk": self.hardware.disk_bytes,
        }
        return {place: size * self.assumed.memory for place, size in sizes.items()}


@dataclass(frozen=True)
class Candidate:
    """One layout with its plan.

    Attributes:
        values: of the configuration, nested.
        config: made of them.
        placement: where its state lives.
        stages: bytes of each pipeline stage's ranks.
        seconds: None where it does not fit.
        over: bytes missing by place.
    """

    values: Mapping[str, Any]
    config: Config
    placement: Placement
    stages: tuple[RankBytes, ...]
    over: Mapping[str, float]
    seconds: StepSeconds | None = None

    @property
    def fits(self) -> bool:
        """Nothing is missing anywhere."""
        return not self.over

    def rank(self, fastest: float) -> tuple[float, float, float]:
        """For sorting: those within 1 % of the fastest count as equal, and then less state away from the device and
        less memory come first.
        """
        seconds = self.seconds.total if self.seconds else float("inf")
        away = self.fullest.host + self.fullest.disk
        return (1.0, away, self.fullest.peak) if seconds <= CLOSE * fastest else (seconds / fastest, away, 0.0)

    @property
    def fullest(self) -> RankBytes:
        """The stage with the highest peak on the device."""
        return max(self.stages, key=lambda stage: stage.peak)


@dataclass
class Found:
    """What a search looked at.

    Attributes:
        fitting: from the fastest on.
        closest: per (tp, cp, pp, dp), the candidate that misses fewest bytes, where none fits.
        refused: rules that forbid candidates, with how many.
        looked_at: number of candidates whose bytes were counted.
    """

    fitting: list[Candidate] = field(default_factory=list)
    closest: dict[tuple[int, int, int, int], Candidate] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    looked_at: int = 0


class LayoutSearch:
    """All layouts of one step of one model on one machine.

    Args:
        arch: the model.
        step: the rollouts.
        machine: what it runs on.
        values: configuration that all candidates share; a key that is searched and given here stays as given.

    Raises:
        ValueError: `values` breaks a rule on its own.
    """

    def __init__(self, arch: Architecture, step: StepShape, machine: Machine, values: Mapping[str, Any]) -> None:
        self.arch, self.step, self.machine, self.values = arch, step, machine, values
        config = make_config(values)
        self.rollouts = step.rows()
        self._trees: tuple[Tree, ...] = build_trees(self.rollouts, share=config.branch.gradient != "dense")
        self._plans: dict[Any, BusiestRank] = {}
        self._estimates: dict[Any, Estimate] = {}
        self._placements: dict[Any, list[Placement]] = {}
        self._counts: dict[Any, dict[int, ByteCount]] = {}

    def run(self) -> Found:
        """Look at every candidate, then retain what activations still fit where something does."""
        found = Found()
        for values in self._candidates():
            if (config := self._allowed(values, found)) is not None:
                self._place(found, values, config)
        if "activations" not in self.values.get("branch", {}):
            by_time = sorted(found.fitting, key=lambda c: c.seconds.total if c.seconds else 0.0)
            for candidate in by_time[:RETAIN_TRIES]:
                self._retain(found, candidate)
        fastest = min((c.seconds.total for c in found.fitting if c.seconds), default=0.0)
        found.fitting.sort(key=lambda candidate: candidate.rank(fastest))
        fitting = {_axes(candidate.config) for candidate in found.fitting}
        found.closest = {axes: candidate for axes, candidate in found.closest.items() if axes not in fitting}
        return found

    def _allowed(self, values: Mapping[str, Any], found: Found) -> Config | None:
        """The configuration, unless a rule of the program forbids it."""
        try:
            config = make_config(values)
            sizes = config.parallel
            check_layout(self.arch, tp=sizes.tp, pp=sizes.pp, ulysses=sizes.ulysses)
            check_reduction(config, self.machine.devices)
        except ValueError as error:
            found.refused[str(error).removeprefix("config: ")] += 1
            return None
        return config

    def _consider(self, found: Found, candidate: Candidate) -> None:
        found.looked_at += 1
        if candidate.fits:
            found.fitting.append(candidate)
            return
        axes = _axes(candidate.config)
        best = found.closest.get(axes)
        if best is None or sum(candidate.over.values()) < sum(best.over.values()):
            found.closest[axes] = candidate

    def _place(self, found: Found, values: Mapping[str, Any], config: Config) -> None:
        """The layout with its state where it costs least time in copies, as `state.placement: auto` chooses."""
        if "placement" in values.get("state", {}):
            place = config.state.placement
            if place == "auto":
                found.refused["state.placement=auto is what the search decides; leave it out"] += 1
            else:
                self._consider(found, self._weigh(values, config, Placement.everything(place)))
            return
        files = config.state.nvme_path is not None
        for placement in self._ranked(config, files=files):
            candidate = self._weigh(values, config, placement)
            if candidate.fits or placement == Placement.everything("nvme" if files else "host"):
                self._consider(found, candidate)
                return

    def _ranked(self, config: Config, *, files: bool) -> list[Placement]:
        """Placements by their copies."""
        key = config.branch.chunk_tokens, config.parallel
        if key not in self._placements:
            estimate = Estimate(config, self.arch, self._planned(config), placement=Placement())
            self._placements[key] = by_copies(estimate.moved(), files=files)
        return self._placements[key]

    def _retain(self, found: Found, candidate: Candidate) -> None:
        """The same layout with graphs kept in the memory that it leaves free."""
        free = self.machine.room["device"] - sum(candidate.fullest.device.values())
        budget = int(free // BUDGET_STEP * BUDGET_STEP)
        if budget > 0:
            branch = {"activations": "auto", "activation_budget_bytes": budget}
            values = _merged({"branch": branch}, candidate.values)
            if (config := self._allowed(values, found)) is not None:
                self._consider(found, self._weigh(values, config, candidate.placement))

    def _weigh(self, values: Mapping[str, Any], config: Config, placement: Placement) -> Candidate:
        zero = config.zero.stage
        key = config.model_copy(update={"zero": ZeroConfig(reduce=config.zero.reduce)}), placement
        if key not in self._estimates:
            known = self._counts.setdefault((_unaffected(config), placement), {})
            step = self._planned(config)
            self._estimates[key] = Estimate(config, self.arch, step, placement=placement, counts=known)
        estimate = self._estimates[key]
        stages = tuple(estimate.rank_bytes(stage, zero=zero) for stage in range(config.parallel.pp))
        room = self.machine.room
        needed = {
            "device": max(stage.peak for stage in stages),
            "host": max(stage.host for stage in stages),
            "disk": max(stage.disk for stage in stages),
        }
        over = {place: size - room[place] for place, size in needed.items() if size > room[place]}
        if over:
            return Candidate(values, config, placement, stages, over)
        budget = min(room["device"] - stage.peak for stage in stages)
        budget += min(estimate.state_bytes(stage) for stage in range(len(stages)))
        values = _merged({"state": _state_section(placement, int(budget))}, values)
        candidate = Candidate(values, make_config(values), placement, stages, over)
        seconds = estimate.seconds(self.machine.hardware, self.machine.assumed, zero=zero)
        return replace(candidate, seconds=seconds)

    def _planned(self, config: Config) -> BusiestRank:
        """The program's own plan of the step and its orders."""
        sizes = config.parallel
        dp = sizes.data_parallel(self.machine.devices)
        key = (config.branch, dp, sizes)
        if key not in self._plans:
            layout, shape = Layout(dp, sizes.cp, sizes.pp), self.arch.shape()
            retained = [stage.activations for stage in stage_sizes(config, self.arch, device="cuda")]
            trees = gate_trees(
                self._trees, self.rollouts, config=config.branch, layout=layout, shape=shape, sizes=retained
            )
            plan = make_plan(
                trees,
                self.rollouts,
                config=config.branch,
                layout=layout,
                aggregation=config.objective.aggregation,
                shape=shape,
                sizes=retained,
            )
            self._plans[key] = busiest_rank(plan, trees, self.rollouts, pp=sizes.pp)
        return self._plans[key]

    def _candidates(self) -> Iterator[dict[str, Any]]:
        """Every combination of the axes that are not given, as nested values."""
        tokens = self.step.prompt + self.step.rollouts * self.step.response
        chunks = [chunk for chunk in CHUNKS if tokens / chunk < MOST_UNITS]
        for (tp, cp, pp, dp), zero, chunk in product(self._meshes(), ZEROS, chunks):
            for ulysses, again in product([size for size in range(1, cp + 1) if cp % size == 0], (False, True)):
                heads = {} if ulysses == 1 else {"cp_mode": "ulysses", "ulysses_size": ulysses}
                searched = {
                    "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp, **heads},
                    "zero": zero,
                    "branch": {"chunk_tokens": chunk, "pack_tokens": chunk, "recompute_layers": again},
                }
                if _agrees(searched, self.values):
                    yield _merged(searched, self.values)

    def _meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """Axes that multiply to the number of devices; a data-parallel rank without a tree would have no work."""
        sizes = [size for size in range(1, self.machine.devices + 1) if self.machine.devices % size == 0]
        for tp, cp, pp in product(sizes, repeat=3):
            dp, rest = divmod(self.machine.devices, tp * cp * pp)
            if rest == 0 and 1 <= dp <= self.step.groups:
                yield tp, cp, pp, dp


def _unaffected(config: Config) -> Any:
    """The settings that the bytes of the state depend on."""
    branch = config.branch
    return branch.chunk_tokens, branch.pack_tokens, branch.activation_budget_bytes, branch.activations, config.parallel


def _state_section(placement: Placement, budget: int) -> dict[str, Any]:
    """The section `state` that makes the program choose this placement."""
    places = set(placement.places.values())
    if len(places) == 1:
        return {"placement": places.pop()}
    return {"placement": "auto", "device_budget_bytes": budget}


def _axes(config: Config) -> tuple[int, int, int, int]:
    sizes = config.parallel
    return sizes.tp, sizes.cp, sizes.pp, sizes.dp or 1


def _agrees(searched: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """No searched key contradicts a given one."""
    return all(
        given.get(section, {}).get(key, value) == value
        for section, keys in searched.items()
        for key, value in keys.items()
    )


def _merged(searched: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    sections = {**given}
    for section, keys in searched.items():
        sections[section] = {**keys, **given.get(section, {})}
    return sections
