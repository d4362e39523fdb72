"""A step with trees in a Megatron training loop gives the gradients of Megatron's own schedule on the same rollouts.

The truth runs every rollout as a microbatch through Megatron's own schedule, layers and attention, on one rank (its
local attention knows no context parallelism), with the same loss function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_branch.engine.megatron_host import MegatronHost
from megatron_branch.objective.advantages import advantages
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.rollouts.record import Rollout
from megatron_branch.rollouts.synthetic import odd_rollouts
from tests.harness import run_ranks
from tests.parity import megatron_steps
from tests.parity.megatron_steps import LoopCase, Outcome, one_step
from tests.parity.steps import relative
from tests.tiny import write_tiny_model

# The same sums in another order, see test_exact; a planted fault is a million times as large.
FLOAT64, VISIBLE = 1e-10, 1e-4
# Megatron's cross entropy rounds logits to float32, so to 2**-24 of their size, in both: a fault of 1 % is far off.
ROUNDED = 1e-6
VOCAB = 98  # even: Megatron's softmax has no mask for the rows that pad a vocabulary
TP, CP, PP, DP = (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)
Key = tuple[bool, bool]


def rollouts() -> list[Rollout]:
    """The odd rollouts, with the advantages that the planner would estimate."""
    rows = [row for row in odd_rollouts(VOCAB, 0) if len(row) > 1]
    values = advantages(rows, estimator="grpo")
    return [dataclasses.replace(row, advantage=value.copy()) for row, value in zip(rows, values, strict=True)]


def several(cases: Sequence[LoopCase], rows: Sequence[Rollout]) -> list[Outcome]:
    return [one_step(case, rows) for case in cases]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether embeddings are tied."""
    folder = tmp_path_factory.mktemp("models")
    return {
        tied: write_tiny_model(folder / f"tied{tied}", "qwen3", vocab=VOCAB, tied=tied, seed=3)
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def truths(models: dict[bool, Path]) -> dict[Key, Outcome]:
    """By whether tied, per token."""
    keys = [(tied, per_token) for tied in (False, True) for per_token in (False, True)]
    cases = [LoopCase(models[tied], trees=False, per_token=per_token, adopted=False) for tied, per_token in keys]
    return dict(zip(keys, run_ranks(1, several, cases, rollouts(), timeout_s=300)[0], strict=True))


def truth_of(case: LoopCase, truths: dict[Key, Outcome]) -> Outcome:
    return truths[case.model.name == "tiedTrue", case.per_token]


def worst(case: LoopCase, outcome: Outcome, truth: Outcome) -> tuple[float, str]:
    """Largest relative error over the gradients and updates of all parameters, and where."""
    assert outcome.gradients.keys() == truth.gradients.keys() == outcome.weights.keys()
    assert all(gradient.norm() > 0 for gradient in truth.gradients.values())
    scale = case.loss_scale
    errors = [(relative(outcome.gradients[name], scale * truth.gradients[name]), name) for name in truth.gradients]
    if scale == 1.0:  # Megatron's plain optimizer does not divide by it
        errors += [(relative(outcome.weights[name], truth.weights[name]), name) for name in truth.weights]
    return max(errors)


def cases(models: dict[bool, Path], world: int) -> list[LoopCase]:
    plain, tied = models[False], models[True]
    if world == 1:
        return [
            LoopCase(plain),
            LoopCase(tied, per_token=True, branch=BranchConfig(activations="retain", gate=False)),
            LoopCase(plain, branch=BranchConfig(gradient="dense")),
            LoopCase(tied, branch=BranchConfig(chunk_tokens=16, recompute_layers=True, gate=False)),
        ]
    if world == 2:
        return [
            LoopCase(plain, TP),
            LoopCase(tied, TP, sequence_parallel=True, per_token=True),
            LoopCase(plain, TP, sequence_parallel=True),
            LoopCase(plain, CP),
            LoopCase(tied, CP, per_token=True, ulysses=2),
            LoopCase(tied, PP),
            LoopCase(tied, PP, per_token=True),
            LoopCase(plain, DP),
            LoopCase(plain, DP, per_token=True),
            LoopCase(plain, DP, shares_per_token=True),
            LoopCase(tied, DP, overlap=True),
            LoopCase(plain, DP, overlap=True, per_token=True, loss_scale=8.0),
        ]
    return [LoopCase(tied, (1, 2, 2, 1)), LoopCase(plain, (1, 2, 2, 1), per_token=True)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_and_updates_are_megatron_s(models: dict[bool, Path], truths: dict[Key, Outcome], world: int) -> None:
    mine = cases(models, world)
    by_rank = run_ranks(world, several, mine, rollouts(), timeout_s=400)
    for place, case in enumerate(mine):
        truth = truth_of(case, truths)
        error = worst(case, by_rank[0][place], truth)
        assert error[0] < FLOAT64, f"{case}: {error}"
        assert abs(by_rank[0][place].loss / truth.loss - 1) < FLOAT64, case
        assert all(ranks[place].replicas_agree for ranks in by_rank), case
        assert {ranks[place].finalised for ranks in by_rank} == {1}, case
        # Logits only of passes with loss, on the last stage.
        assert all(ranks[place].heads == len(ranks[place].reports) for ranks in by_rank), case


def assert_as_close_as_dense(case: LoopCase, step: Callable[[list[LoopCase]], list[Outcome]]) -> None:
    """In bfloat16 a tree's gradient and update are at most twice as far from float32 as dense bfloat16's are."""
    dense = dataclasses.replace(case, trees=False)
    truth, plain, trees = step([dataclasses.replace(dense, dtype=torch.float32), dense, case])
    assert distance(trees.gradients, truth.gradients) < 2 * distance(plain.gradients, truth.gradients) < 0.2
    assert distance(trees.weights, truth.weights) < 2 * distance(plain.weights, truth.weights)


def distance(mine: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of all parameters together."""
    names = sorted(truth)
    flat = [torch.cat([tensors[name].double().flatten() for name in names]) for tensors in (mine, truth)]
    return relative(*flat)


def test_bfloat16(models: dict[bool, Path]) -> None:
    """Without an optimizer: Megatron's for bfloat16 insists on CUDA tensors."""
    case = LoopCase(models[False], dtype=torch.bfloat16, optimizer=None, rounded_logits=True)
    assert_as_close_as_dense(case, lambda cases: run_ranks(1, several, cases, rollouts(), timeout_s=200)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("clip_grad", [0.0, 1e-3])
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_optimizers_and_clipping(models: dict[bool, Path], tmp_path: Path, optimizer: Any, clip_grad: float) -> None:
    """In this process: the ranks of other tests see no GPU."""
    case = LoopCase(models[False], dtype=torch.bfloat16, optimizer=optimizer, clip_grad=clip_grad, rounded_logits=True)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        assert_as_close_as_dense(case, lambda cases: several(cases, rollouts()))
    finally:
        dist.destroy_process_group()


def test_an_error_in_the_loss_function_leaves_the_next_step_right(
    models: dict[bool, Path], truths: dict[Key, Outcome]
) -> None:
    case = LoopCase(models[False], error_first=True)
    outcome = run_ranks(1, several, [case], rollouts(), timeout_s=120)[0][0]
    assert worst(case, outcome, truth_of(case, truths))[0] < FLOAT64
    phases = {"forward-backward", "all-grads-sync", "branch-capture", "branch-tail", "branch-replay"}
    assert phases <= outcome.timed


def test_megatron_s_own_cross_entropy(models: dict[bool, Path], truths: dict[Key, Outcome]) -> None:
    case = LoopCase(models[False], rounded_logits=True)
    outcome = run_ranks(1, several, [case], rollouts(), timeout_s=120)[0][0]
    assert worst(case, outcome, truth_of(case, truths))[0] < ROUNDED


def test_ordinary_batches_are_computed_as_before(models: dict[bool, Path]) -> None:
    """Bitwise, through our function and layers."""
    theirs = LoopCase(models[True], trees=False, adopted=False, rounded_logits=True)
    ours = dataclasses.replace(theirs, adopted=True)
    before, after = run_ranks(1, several, [theirs, ours], rollouts(), timeout_s=120)[0]
    assert before.reports == after.reports
    assert all(torch.equal(before.gradients[name], after.gradients[name]) for name in before.gradients)


def test_evaluation(models: dict[bool, Path], truths: dict[Key, Outcome]) -> None:
    """No gradient, no finalisation, the same loss; with the pipeline too."""
    case = LoopCase(models[False], PP, forward_only=True)
    first, last = run_ranks(2, several, [case], rollouts(), timeout_s=120)
    assert first[0].loss == pytest.approx(truth_of(case, truths).loss, rel=FLOAT64)
    assert all(not gradient.any() for gradient in first[0].gradients.values())
    assert first[0].finalised == last[0].finalised == 0
    assert first[0].reports == [] and last[0].reports


Fault = Callable[[], AbstractContextManager[Any]]


def not_finalised() -> AbstractContextManager[Any]:
    return patch.object(megatron_steps, "finalize_model_grads", lambda *args, **options: None)


def finalised_twice() -> AbstractContextManager[Any]:
    original = megatron_steps.finalize_model_grads

    def twice(*args: Any, **options: Any) -> None:
        original(*args, **options)
        original(*args, **options)

    return patch.object(megatron_steps, "finalize_model_grads", twice)


def scaled_as_a_microbatch() -> AbstractContextManager[Any]:
    """Megatron's schedules multiply a loss by the context-parallel size."""
    original = MegatronHost.final

    def final(self: MegatronHost, loss_function: Any) -> Any:
        def scaled(output: Any) -> Any:
            loss, *rest = loss_function(output)
            return loss * 2, *rest

        return original(self, scaled)

    return patch.object(MegatronHost, "final", final)


@contextmanager
def mean_left_in() -> Iterator[None]:
    """DDP's mean over ranks is not undone."""
    original = MegatronHost.__init__

    def init(self: MegatronHost, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._ddp = None

    with patch.object(MegatronHost, "__init__", init):
        yield


def reductions_between_passes() -> AbstractContextManager[Any]:
    return patch.object(DistributedDataParallel, "no_sync", lambda self: nullcontext())


def overlap_never_started() -> AbstractContextManager[Any]:
    return patch.object(MegatronHost, "_start_reduction", lambda self: None)


FAULTS: dict[Fault, LoopCase] = {
    not_finalised: LoopCase(Path(), DP),
    finalised_twice: LoopCase(Path(), DP, per_token=True),  # a mean taken twice is the same
    scaled_as_a_microbatch: LoopCase(Path(), CP),
    mean_left_in: LoopCase(Path(), CP),
    reductions_between_passes: LoopCase(Path(), DP, overlap=True),
    overlap_never_started: LoopCase(Path(), DP, overlap=True),
}


def with_faults(model: Path, rows: Sequence[Rollout]) -> list[Outcome | str]:
    """Per fault, what came out or the assertion of Megatron that stopped it."""
    results: list[Outcome | str] = []
    for fault, case in FAULTS.items():
        try:
            with fault():
                results.append(one_step(dataclasses.replace(case, model=model), rows))
        except AssertionError as error:
            results.append(str(error))
    return results


def test_a_fault_is_seen(models: dict[bool, Path], truths: dict[Key, Outcome]) -> None:
    found = run_ranks(2, with_faults, models[False], rollouts(), timeout_s=300)[0]
    for (fault, case), outcome in zip(FAULTS.items(), found, strict=True):
        if isinstance(outcome, str):
            assert "ommunication" in outcome, outcome  # Megatron's bookkeeping of reductions
        else:
            assert worst(case, outcome, truths[False, case.per_token])[0] > VISIBLE, fault.__name__
