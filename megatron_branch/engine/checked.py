"""What can be checked before ranks start, weights load or Megatron is imported."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_branch.config import Config
from megatron_branch.engine.architecture import Architecture, architecture_from_config, check_layout
from megatron_branch.engine.convert import check_source
from megatron_branch.engine.hf_source import Source, open_source
from megatron_branch.rollouts.reader import read_rollouts


@dataclass(frozen=True)
class Checked:
    """A model folder whose settings and tensors were checked, before any weight is read."""

    source: Source
    arch: Architecture


def check_model(config: Config) -> Checked:
    """Open the model folder and check it against the layout, without torch.distributed and without loading.

    Raises:
        ValueError: the folder, a setting or the layout cannot be used; the message says what to change.
    """
    source = open_source(config.model.path, config.model.gguf_file)
    arch = architecture_from_config(source.config, source=str(source))
    check_layout(arch, tp=config.parallel.tp, pp=config.parallel.pp)
    check_source(source, arch)
    return Checked(source, arch)


def check_rows(config: Config, arch: Architecture) -> None:
    """Read every row of the rollouts file once.

    Raises:
        ValueError: see `read_rollouts`.
    """
    for _ in read_rollouts(config.data.rollouts, vocab_size=arch.vocab):
        pass
