"""Settings that are right alone must be right together: drawn combinations of everything that must not change numbers.

Each draw picks a model, rollouts, a gradient, a layout and every other setting that the layout allows; the truth is the
same gradient on one rank with no other setting. A few draws by default, many behind the marker `slow`.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute
from tests.tiny import Family, write_tiny_model

FLOAT64 = 1e-10  # as in test_exact
LAYOUTS = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(2, 2, 1, 1), (1, 4, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 4, 1), (2, 1, 1, 2), (1, 2, 1, 2)],
    8: [(2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 2, 1), (2, 2, 1, 2)],
}
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
Draw = tuple[Case, int]  # and the seed of its rollouts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four query heads and four KV heads in one of them, two in the others."""
    folder = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(
            folder / family, family, layers=4, kv_heads=4 if family == "llama" else 2, tied=family != "qwen2"
        )
        for family in FAMILIES
    ]


def state_settings(generator: random.Random, placement: str, retaining: bool) -> tuple[tuple[str, object], ...]:
    """Section `state` for a placement, with what it needs."""
    settings: dict[str, object] = {"placement": placement}
    if placement == "auto":
        # Graphs of retained chunks stay on the device, whatever the placement.
        settings["device_budget_bytes"] = 10**9 if retaining else generator.choice([500_000, 10**9])
    if placement in ("nvme", "auto"):
        settings["nvme_path"] = tempfile.gettempdir()
    return tuple(settings.items())


def draw(generator: random.Random, models: list[Path], world: int) -> Draw:
    """One combination that the rules allow."""
    tp, cp, pp, dp = generator.choice(LAYOUTS[world])
    activations = generator.choice(["recompute", "retain", "auto"])
    gradient = generator.choice(["exact", "exact", "exact", "detached"])
    case = Case(
        generator.choice(models),
        (tp, cp, pp, dp),
        gradient,
        chunk_tokens=generator.choice([3, 7, 16, 40, None]),
        pack_tokens=generator.choice([1, 9, 2048]),
        ulysses=generator.choice([size for size in (1, 2, 4) if cp % size == 0 and 4 // tp % size == 0]),
        sequence_parallel=tp > 1 and generator.random() < 0.5,
        activations=activations,
        budget_bytes=generator.choice([0, 200_000, 10**9]) if activations == "auto" else None,
        recompute_layers=generator.random() < 0.4,
        gate=generator.random() < 0.3,
        state=state_settings(
            generator, generator.choice(["device", "host", "nvme", "auto"]), activations != "recompute"
        ),
    )
    return case, generator.randrange(3)


def compute_jobs(jobs: list[tuple[Case, list[Rollout]]]) -> list[Numbers]:
    return [compute(case, rollouts) for case, rollouts in jobs]


def check(draws: list[Draw], *, timeout_s: float) -> None:
    """All draws of one world size against their truths."""
    rollouts = {seed: odd_rollouts(97, seed) for seed in range(3)}
    truth_of: dict[Draw, Draw] = {d: (Case(d[0].model, gradient=d[0].gradient), d[1]) for d in draws}
    wanted = list(dict.fromkeys(truth_of.values()))
    truths = run_ranks(1, compute_jobs, [(case, rollouts[seed]) for case, seed in wanted], timeout_s=timeout_s)[0]
    truth = dict(zip(wanted, truths, strict=True))
    world = draws[0][0].world
    by_rank = run_ranks(world, compute_jobs, [(case, rollouts[seed]) for case, seed in draws], timeout_s=timeout_s)
    for place, drawn in enumerate(draws):
        assert_same(drawn[0], by_rank[0][place], truth[truth_of[drawn]], FLOAT64)
        for rank, results in enumerate(by_rank):
            assert results[place].state_bytes == results[place].predicted_bytes, f"{drawn}, rank {rank}"


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_few_combinations(models: list[Path], world: int) -> None:
    generator = random.Random(world)
    check([draw(generator, models, world) for _ in range({1: 6, 2: 10, 4: 8, 8: 3}[world])], timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_many_combinations(models: list[Path], world: int) -> None:
    generator = random.Random(100 + world)
    check([draw(generator, models, world) for _ in range({1: 60, 2: 120, 4: 90, 8: 40}[world])], timeout_s=3600)


def test_draws_reach_every_setting(models: list[Path]) -> None:
    seen: dict[str, set[object]] = defaultdict(set)
    for world in LAYOUTS:
        generator = random.Random(world)
        for case, _ in (draw(generator, models, world) for _ in range(60)):
            for name in (
                "gradient",
                "ulysses",
                "sequence_parallel",
                "activations",
                "recompute_layers",
                "gate",
                "layout",
            ):
                seen[name].add(getattr(case, name))
            seen["placement"].add(dict(case.state)["placement"])
    sizes = {name: len(values) for name, values in seen.items()}
    layouts = sum(map(len, LAYOUTS.values()))
    assert sizes == {
        "gradient": 2, "ulysses": 3, "sequence_parallel": 2, "activations": 3, "recompute_layers": 2, "gate": 2,
        "layout": layouts, "placement": 4,
    }  # fmt: skip
