"""What Megatron does around its schedules, for a step that shares prefixes.

Losses leave here as they enter the backward. Megatron's own schedules multiply a loss by the context-parallel size and
divide it by the number of microbatches; a pass is no microbatch, so neither is done. What its data-parallel wrapper
divides gradients by is undone here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from megatron_branch.engine.adopt import check_adopted

LossFunction = Callable[[Any], tuple[Tensor, Any]]


class MegatronHost:
    """The model of one stage, in Megatron's wrappers or not, and its configuration, for one step.

    Args:
        model: what the user's forward step is given.
        pg_collection: the groups that `finalize_model_grads_func` is given; None: Megatron's own.
        force_all_reduce: handed to the gradient reduction.

    Raises:
        ValueError: the model, or the wrapper around it, does not compute branch passes.
    """

    def __init__(self, model: nn.Module, *, pg_collection: Any = None, force_all_reduce: bool | None = False) -> None:
        if isinstance(model, _BaseDataParallel) and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"{type(model).__name__} is not supported for trees of rollouts: it reduces or frees what later passes "
                "of the same step need; wrap the model in Megatron's DistributedDataParallel"
            )
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            raise ValueError(
                "DistributedDataParallelConfig.overlap_param_gather gathers weights in the first forward pass, which a "
                "data-parallel rank without a tree does not make; set it to False"
            )
        self._model, self._pg_collection, self._force_all_reduce = model, pg_collection, force_all_reduce
        self._config = get_model_config(model)
        self._gpt = get_attr_wrapped_model(model, "post_process", return_model_obj=True)
        check_adopted(self._gpt)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._tokens = torch.zeros((), dtype=torch.int, device=next(model.parameters()).device)

    @contextmanager
    def step(self, *, forward_only: bool) -> Iterator[None]:
        """The passes of a step: gradients are reduced and finalised once, after the last of them."""
        if hasattr(self._model, "set_is_first_microbatch"):
            self._model.set_is_first_microbatch()
        with self._timed():
            with nullcontext() if forward_only else self._no_sync():
                yield
            if not forward_only:
                self._start_reduction()
                self._finalise()

    def set_input(self, stage_input: Tensor | None) -> None:
        """Hand the next pass the hidden states of the stage before; None on the first stage."""
        get_attr_wrapped_model(self._model, "set_input_tensor")([stage_input])

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """The model returns the hidden states inside: what a pass on the last stage without loss needs."""
        before = self._gpt.post_process
        self._gpt.post_process = False
        try:
            yield
        finally:
            self._gpt.post_process = before

    def final(self, loss_function: LossFunction) -> LossFunction:
        """The user's loss function in terms of the runner's: `(loss that is differentiated, report)`."""

        def scaled(output: Any) -> tuple[Tensor, Any]:
            outcome = loss_function(output)
            if len(outcome) == 3:
                self._count(outcome[1])
            loss = outcome[0]
            if self._ddp is not None and not self._config.calculate_per_token_loss:
                loss = loss * self._ddp.dp_cp_group.size()  # DDP takes the mean over these ranks
            if self._config.grad_scale_func is not None:
                loss = self._config.grad_scale_func(loss)
            return loss, outcome[-1]

        return scaled

    def _count(self, tokens: Any) -> None:
        if not self._config.calculate_per_token_loss:
            raise ValueError(
                "the loss function returned (loss, tokens, report) and calculate_per_token_loss is off: Megatron then "
                "takes the mean over each microbatch, and a pass of a tree is none. Set calculate_per_token_loss=True "
                "to divide by the tokens of the whole step, or return (loss, report) with the loss multiplied by "
                "`weight`, which has the denominator in it"
            )
        self._tokens += tokens

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Megatron's timer of its schedules, stopped after an error too: it refuses to start twice."""
        timers = self._config.timers
        if timers is None:
            yield
            return
        timers("forward-backward", log_level=1).start(barrier=self._config.barrier_with_L1_time)
        try:
            yield
        finally:
            timers("forward-backward").stop()

    def _finalise(self) -> None:
        config = self._config
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                [self._model],
                self._tokens if config.calculate_per_token_loss else None,
                pg_collection=self._pg_collection or _megatron_groups(),
                force_all_reduce=self._force_all_reduce,
            )

    def _no_sync(self) -> AbstractContextManager[Any]:
        """No reduction starts inside, however many passes a parameter takes part in."""
        if self._config.no_sync_func is not None:
            return self._config.no_sync_func()
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def _start_reduction(self) -> None:
        """What overlapping backward passes would have started, all of it; without overlap, finalising reduces."""
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        elif self._ddp is not None and self._ddp.ddp_config.overlap_grad_reduce:
            for buckets in self._ddp.bucket_groups + self._ddp.expert_parallel_bucket_groups:
                buckets.start_grad_sync(force_all_reduce=self._force_all_reduce)


def _megatron_groups() -> ProcessGroupCollection:
    """The groups that Megatron's schedules hand on when they are given none."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
