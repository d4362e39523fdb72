"""Chunked scores against plain log_softmax on one rank; tests/distributed/test_logprobs.py splits the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_branch.objective.logprobs import HeadSettings, TokenScores, token_scores
from megatron_branch.objective.reference import reference_scores

ROWS, HIDDEN, VOCAB, PADDED = 8, 12, 97, 98
# Sums of ~100 float64 terms of order 1 to 10: rounding stays below 100 * 10 * 2^-53 = 1e-13. A fault of 1 % is 1e-2.
FLOAT64 = 1e-12
SETTINGS = HeadSettings(temperature=0.7, vocab=VOCAB, chunk_tokens=3, entropy=True)


def problem(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Peaked distributions; padded weight rows are loud, so that a softmax that sees them is visibly wrong."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, dtype=torch.float64, generator=generator)
    weight[VOCAB:] *= 100
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    if rows > 1:
        targets[:2] = torch.tensor([0, VOCAB - 1])
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def uneven_sum(scores: TokenScores) -> Tensor:
    """A scalar whose gradient differs in size and sign from row to row and between log-prob and entropy."""
    rows = scores.logp_T.shape[0]
    slope = torch.linspace(-1.0, 2.0, rows, dtype=scores.logp_T.dtype)
    total = (slope * scores.logp_T).sum()
    if scores.entropy_T is not None:
        total = total + ((slope.flip(0) + 0.3) * scores.entropy_T).sum()
    return total


def value_and_gradients(function: object, settings: HeadSettings, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    hidden, weight, targets = problem(dtype)
    scores = function(hidden, weight, targets, settings=settings)  # type: ignore[operator]
    values = [scores.logp_T] + ([scores.entropy_T] if settings.entropy else [])
    return [v.detach() for v in values] + list(torch.autograd.grad(uneven_sum(scores), [hidden, weight]))


@pytest.mark.parametrize("entropy", [False, True], ids=["logp", "logp_and_entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, None])
def test_values_and_gradients_equal_log_softmax(chunk_tokens: int | None, temperature: float, entropy: bool) -> None:
    settings = HeadSettings(temperature=temperature, vocab=VOCAB, chunk_tokens=chunk_tokens, entropy=entropy)
    ours = value_and_gradients(token_scores, settings)
    truth = value_and_gradients(reference_scores, settings)
    for ours_one, truth_one in zip(ours, truth, strict=True):
        torch.testing.assert_close(ours_one, truth_one, rtol=FLOAT64, atol=FLOAT64)


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    settings = HeadSettings(temperature=0.7, vocab=5, chunk_tokens=2, entropy=True)

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = token_scores(hidden, weight, torch.tensor([0, 4, 2]), settings=settings)
        assert out.entropy_T is not None
        return out.logp_T, out.entropy_T

    assert torch.autograd.gradcheck(scores, (hidden, weight))


@pytest.mark.parametrize("part", ["logp", "entropy"])
def test_each_output_alone_carries_its_gradient(part: str) -> None:
    gradients = []
    for function in (token_scores, reference_scores):
        hidden, weight, targets = problem()
        scores = function(hidden, weight, targets, settings=SETTINGS)
        output = scores.logp_T if part == "logp" else scores.entropy_T
        assert output is not None
        gradients.append(torch.autograd.grad(output.square().sum(), [hidden, weight]))
    for ours, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, truth, rtol=FLOAT64, atol=FLOAT64)


def test_no_rows() -> None:
    hidden, weight, targets = problem(rows=0)
    scores = token_scores(hidden, weight, targets, settings=SETTINGS)
    assert scores.logp_T.shape == (0,)
    grad_hidden, grad_weight = torch.autograd.grad(uneven_sum(scores), [hidden, weight])
    assert grad_hidden.shape == (0, HIDDEN)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets = problem()
    tensors = {"hidden": hidden, "weight": weight}
    tensors[frozen].requires_grad_(False)
    uneven_sum(token_scores(hidden, weight, targets, settings=SETTINGS)).backward()
    truth = dict(zip(("hidden", "weight"), value_and_gradients(reference_scores, SETTINGS)[-2:], strict=True))
    assert tensors.pop(frozen).grad is None
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, truth[name], rtol=FLOAT64, atol=FLOAT64)


def test_strided_hidden_states() -> None:
    hidden, weight, targets = problem()
    wide = torch.stack([hidden.detach(), -hidden.detach()], dim=2).requires_grad_()
    out = token_scores(wide[:, :, 0], weight, targets, settings=SETTINGS).logp_T
    truth = reference_scores(hidden, weight, targets, settings=SETTINGS).logp_T
    torch.testing.assert_close(out, truth, rtol=FLOAT64, atol=FLOAT64)
    ours, expected = torch.autograd.grad(out.sum(), wide)[0], torch.autograd.grad(truth.sum(), hidden)[0]
    torch.testing.assert_close(ours[:, :, 0], expected, rtol=FLOAT64, atol=FLOAT64)


def test_parameter_storage_may_move_between_forward_and_backward() -> None:
    """A host that partitions parameters empties `.data` after the forward and fills it again before the backward."""
    hidden, weight, targets = problem()
    truth = value_and_gradients(token_scores, SETTINGS)[-1]
    parameter = torch.nn.Parameter(weight.detach().clone())
    scores = token_scores(hidden, parameter, targets, settings=SETTINGS)
    whole, parameter.data = parameter.data.clone(), torch.empty(0, dtype=weight.dtype)
    parameter.data = whole
    # A copy or a view would have the right values too, but would keep the old storage alive.
    assert any(saved is parameter for saved in scores.logp_T.grad_fn.saved_tensors)
    uneven_sum(scores).backward()
    assert torch.equal(parameter.grad, truth)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation under it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_nothing_of_tokens_times_vocabulary_exists() -> None:
    rows, hidden_size, vocab, chunk = 64, 4, 400, 8
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    settings = HeadSettings(temperature=1.0, vocab=vocab, chunk_tokens=chunk, entropy=True)
    with LargestTensor() as largest:
        uneven_sum(token_scores(hidden, weight, torch.arange(rows), settings=settings)).backward()
    assert largest.elements == chunk * vocab


@pytest.mark.parametrize("chunk_tokens", [3, None])
def test_bfloat16_error_is_that_of_plain_bfloat16(chunk_tokens: int | None) -> None:
    settings = replace(SETTINGS, chunk_tokens=chunk_tokens)
    rounded = [t.detach().float().requires_grad_() for t in problem(torch.bfloat16)[:2]]
    targets = problem()[2]
    scores = reference_scores(*rounded, targets, settings=settings)
    truth = [scores.logp_T, scores.entropy_T, *torch.autograd.grad(uneven_sum(scores), rounded)]
    plain = value_and_gradients(reference_scores, settings, torch.bfloat16)
    ours = value_and_gradients(token_scores, settings, torch.bfloat16)
    for ours_one, plain_one, truth_one in zip(ours, plain, truth, strict=True):
        assert ours_one.dtype == plain_one.dtype
        assert (ours_one - truth_one).norm() <= 2 * (plain_one - truth_one).norm()


def test_weight_gradient_error_in_bfloat16_does_not_grow_with_chunks() -> None:
    """256 chunks summed in bfloat16 would be off by about 1.5e-2; one rounding is at most 2^-9 of each element."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(256, 16, generator=generator) + 2).bfloat16().requires_grad_()
    weight = (torch.randn(11, 16, generator=generator) * 0.05).bfloat16().requires_grad_()
    targets = torch.zeros(256, dtype=torch.int64)
    settings = HeadSettings(temperature=1.0, vocab=11, chunk_tokens=1, entropy=False)
    wide = weight.detach().float().requires_grad_()
    truth = torch.autograd.grad(
        reference_scores(hidden.detach().float(), wide, targets, settings=settings).logp_T.sum(), wide
    )[0]
    ours = torch.autograd.grad(token_scores(hidden, weight, targets, settings=settings).logp_T.sum(), weight)[0]
    assert (ours.float() - truth).norm() <= 4e-3 * truth.norm()
