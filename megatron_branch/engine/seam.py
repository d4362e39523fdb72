"""The schedule under Megatron's own contract.

`get_forward_backward_func()` returns a function with the keyword parameters of Megatron's. A batch that shares
prefixes (a `BranchStep`) is run by the branch schedule; anything else goes to Megatron's own function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol

from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_forward_backward_func
from torch import Tensor, nn

from megatron_branch.engine.megatron_host import LossFunction, MegatronHost
from megatron_branch.engine.pass_batch import pass_batch
from megatron_branch.engine.planner import BranchStep
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
            As Megatron's; for a `BranchStep`, on the last stage, the report of the loss function of each pass with
            loss.

        Raises:
            ValueError: what is asked for is not supported for a `BranchStep`.
        """
        step, data_iterator = _peek(data_iterator)
        if isinstance(step, BranchStep):
            if collect_non_loss_data:
                raise ValueError("collect_non_loss_data=True is not supported for a BranchStep; use forward_only")
            stage = _only_stage(model)
            host = MegatronHost(stage, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
            return run_branch(step, forward_step_func, host, stage, forward_only=forward_only)
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
    """The next item and an iterator that still yields it; of a list, the first one's."""
    if isinstance(data_iterator, list) and data_iterator:
        item, first = _peek(data_iterator[0])
        return item, [first, *data_iterator[1:]]
    if not isinstance(data_iterator, Iterator):
        return None, data_iterator
    for item in data_iterator:
        return item, chain([item], data_iterator)
    return None, data_iterator


def _only_stage(model: nn.Module | list[nn.Module]) -> nn.Module:
    if not isinstance(model, list):
        return model
    if len(model) > 1:
        raise ValueError(
            f"a BranchStep with {len(model)} model chunks: interleaved stages are not supported for trees of rollouts; "
            "unset virtual_pipeline_model_parallel_size"
        )
    return model[0]


class Host(Protocol):
    """What is done around the passes of a step, by those whose layers compute them."""

    def step(self, *, forward_only: bool) -> AbstractContextManager[None]:
        """Around all passes of a step."""
        ...

    def set_input(self, stage_input: Tensor | None) -> None:
        """Hand the next pass the hidden states of the stage before; None on the first stage."""
        ...

    def without_logits(self) -> AbstractContextManager[None]:
        """The model returns the hidden states inside."""
        ...

    def final(self, loss_function: LossFunction) -> LossFunction:
        """A loss function in terms of the runner's."""
        ...


def run_branch(
    step: BranchStep, forward_step_func: Callable[..., Any], host: Host, model: nn.Module, *, forward_only: bool
) -> list[Any]:
    """Run the branch schedule; see `get_forward_backward_func`."""
    last = step.runtime.groups.last_stage

    def forward_step(current: PassInput, stage_input: Tensor | None) -> tuple[Any, Any]:
        host.set_input(stage_input)
        with host.without_logits() if last and current.descriptor.head is None else nullcontext():
            output, loss_function = forward_step_func(iter((pass_batch(current),)), model)
        return output, host.final(loss_function)

    planned = step.planned
    step.runtime.store.place(planned.placement)
    runner = step.runtime.runner(forward_step, recompute_layers=planned.plan.recompute_layers)
    with host.step(forward_only=forward_only):
        order = planned.scoring if forward_only else planned.order
        return runner.run(order, planned.batch, forward_only=forward_only)
