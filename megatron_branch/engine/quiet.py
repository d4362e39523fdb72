"""Keeps the console for what a user can act on."""

from __future__ import annotations

import logging
import warnings


def silence_missing_accelerators() -> None:
    """Hide what Megatron and DeepSpeed say about optional packages (Transformer Engine, apex), devices and functions
    of torch that they should no longer call.
    """
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    warnings.filterwarnings("ignore", message=".*full scope is deprecated.*")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("megatron").setLevel(logging.ERROR)
