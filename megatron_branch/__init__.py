"""RL on trees of rollouts: shared prefixes are computed once, as a Megatron pipeline schedule under DeepSpeed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# What a Megatron training loop imports, and where it is; imported at first use, since it brings Megatron along.
_LAZY = {
    "adopt": "megatron_branch.engine.adopt",
    "adopt_spec": "megatron_branch.engine.spec",
    "get_forward_backward_func": "megatron_branch.engine.seam",
    "make_planner": "megatron_branch.engine.adopt",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
