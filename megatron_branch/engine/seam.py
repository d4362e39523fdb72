"""The schedule under Megatron's own contract.

`get_forward_backward_func()` returns a function with the keyword parameters of Megatron's. A batch that shares
prefixes (a `BranchStep`) is run by the branch schedule; anything else goes to Megatron's own function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_forward_backward_func
from torch import Tensor, nn

from megatron_branch.engine.runtime import BranchStep
from megatron_branch.schedule.runner import PassInput


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Takes the place of `megatron.core.pipeline_parallel.get_forward_backward_func`.

    Args:
        pp_size, vp_size: handed to Megatron's for batches that are no trees.
    """

    def forward_backward(
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Megatron's parameters; for a `BranchStep` the plan knows the passes and their lengths, so the microbatch
        count, the sequence length and what shapes communication are not read.

        Returns:
            For a `BranchStep`, on the last stage, `(unit index, report of the loss function)` per pass with loss.
        """
        step, data_iterator = _peek(data_iterator)
        if isinstance(step, BranchStep):
            stage = model[0] if isinstance(model, list) else model
            return _run_branch(step, forward_step_func, stage, forward_only=forward_only)
        options = {} if pp_size is None and vp_size is None else {"pp_size": pp_size, "vp_size": vp_size}
        return megatron_forward_backward_func(**options)(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )

    return forward_backward


def _peek(data_iterator: Any) -> tuple[Any, Any]:
    """The next item and an iterator that still yields it; lists (interleaved stages) and None are Megatron's alone."""
    if not isinstance(data_iterator, Iterator):
        return None, data_iterator
    for item in data_iterator:
        return item, chain([item], data_iterator)
    return None, data_iterator


def _run_branch(
    step: BranchStep, forward_step_func: Callable[..., Any], model: nn.Module, *, forward_only: bool
) -> list[Any]:
    def forward_step(current: PassInput, stage_input: Tensor | None) -> tuple[Any, Any]:
        model.set_input_tensor(stage_input)
        return forward_step_func(iter((current,)), model)

    runner = step.runtime.runner(forward_step, recompute_layers=step.batch.plan.recompute_layers)
    return runner.run(step.order, step.batch, forward_only=forward_only)
