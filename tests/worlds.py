"""Leaving a layout, so that one world of ranks can run many."""

import torch.distributed as dist
from megatron.core import parallel_state


def leave_layout() -> None:
    """Undo `build_groups` (collective): a gloo group that is only forgotten keeps its thread and its connections."""
    parallel_state.destroy_model_parallel()
    world = dist.distributed_c10d._get_default_group()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not world]:
        dist.destroy_process_group(group)
