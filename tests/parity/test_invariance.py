"""What must not matter: the order of rows, how rows are cut into trees, what siblings say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import SyntheticSpec, odd_rollouts, synthetic_rollouts
from tests.harness import run_ranks
from tests.parity.steps import Case, Numbers, assert_same, compute
from tests.tiny import write_tiny_model

ROLLOUTS = odd_rollouts(97, 0)
FLOAT64 = 1e-10
SPLITS = [(1, 1), (2, 1), (2, 2)]  # context-parallel ranks, size of the Ulysses groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def compute_each(pairs: list[tuple[Case, list[Rollout]]]) -> list[Numbers]:
    return [compute(case, rollouts) for case, rollouts in pairs]


def on_ranks(*pairs: tuple[Case, list[Rollout]]) -> list[Numbers]:
    return run_ranks(pairs[0][0].world, compute_each, list(pairs), timeout_s=120)[0]


def test_order_of_rows(folder: Path) -> None:
    """Another order of rows is another order of trees, children and packs."""
    order = np.random.default_rng(3).permutation(len(ROLLOUTS))
    case = Case(folder, chunk_tokens=16, pack_tokens=12)
    truth, permuted = on_ranks((case, ROLLOUTS), (case, [ROLLOUTS[i] for i in order]))
    permuted.logprobs = [permuted.logprobs[place] for place in np.argsort(order)]
    assert_same(case, permuted, truth, FLOAT64)


def test_trees_split_into_single_rollouts(folder: Path) -> None:
    """Rows of different provenance share nothing."""
    apart = [replace(rollout, provenance=str(index)) for index, rollout in enumerate(ROLLOUTS)]
    case = Case(folder, chunk_tokens=16)
    dense, together, single = on_ranks((Case(folder, gradient="dense"), ROLLOUTS), (case, ROLLOUTS), (case, apart))
    assert_same(case, together, dense, FLOAT64)
    assert_same(case, single, dense, FLOAT64)


@pytest.mark.parametrize(("cp", "ulysses"), SPLITS, ids=["one rank", "pass-Q", "Ulysses"])
def test_a_tree_of_one_rollout_is_ordinary_training(folder: Path, cp: int, ulysses: int) -> None:
    """Bit for bit: unlimited chunks make it one pass, the dense one."""
    case = Case(folder, (1, cp, 1, 1), ulysses=ulysses)
    rollout = [replace(ROLLOUTS[0], advantage=np.full(len(ROLLOUTS[0]), -0.7))]
    dense, exact = on_ranks((replace(case, gradient="dense"), rollout), (case, rollout))
    assert exact.replays == 0
    assert exact.logprobs == dense.logprobs and exact.loss == dense.loss
    assert all(torch.equal(exact.gradients[name], dense.gradients[name]) for name in dense.gradients)


@pytest.mark.parametrize("chunk", [None, 4], ids=["whole tails", "cut tails"])
@pytest.mark.parametrize(("cp", "ulysses"), SPLITS, ids=["one rank", "pass-Q", "Ulysses"])
def test_siblings_do_not_leak(folder: Path, cp: int, ulysses: int, chunk: int | None) -> None:
    """Other tokens in one tail leave the log-probs of all other rollouts as they are, to the last bit."""
    spec = SyntheticSpec(vocab_size=97, groups=1, prefix_tokens=(9, 6), fan_out=(2, 3), tail_tokens=(11, 5, 8), seed=1)
    rollouts = synthetic_rollouts(spec)
    ids = rollouts[1].token_ids.copy()
    ids[-4:] = (ids[-4:] + 31) % 97
    altered = [replace(r, token_ids=ids) if i == 1 else r for i, r in enumerate(rollouts)]
    case = Case(folder, (1, cp, 1, 1), chunk_tokens=chunk, ulysses=ulysses)
    before, after = on_ranks((case, rollouts), (case, altered))
    same = [mine == theirs for mine, theirs in zip(before.logprobs, after.logprobs, strict=True)]
    assert same == [index != 1 for index in range(len(rollouts))]
