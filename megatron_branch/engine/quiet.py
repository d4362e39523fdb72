"""Keeps the console for what a user can act on."""

from __future__ import annotations

import logging
import warnings


def silence_missing_accelerators() -> None:
    """Hide what Megatron and DeepSpeed say at import about optional packages (Transformer Engine, apex) and devices.

    The header of a run says which of them are there.
    """
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    warnings.filterwarnings("ignore", message=".*full scope is deprecated.*")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("megatron").setLevel(logging.ERROR)
