"""Weights & Biases: one run, written by one rank, one row per optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import wandb

from megatron_branch.tracking.config import TrackingConfig
from megatron_branch.tracking.metrics import STEP_KEY


class WandbSink:
    """The run. Only the rank that writes may create one, or W&B would show a run per rank.

    `tracking.wandb=online` leaves the last word to WANDB_MODE (`offline`, `disabled`), as W&B itself does; `offline`
    stays offline whatever the environment says. Credentials and the server's address come from W&B's own settings
    (`WANDB_API_KEY`, `wandb login`, `WANDB_BASE_URL`), which must be there on the host of the writing rank.
    """

    def __init__(self, config: TrackingConfig, *, run_config: Mapping[str, Any], run_id: str | None = None) -> None:
        """Start the run, or continue the one with `run_id` (offline: another folder with the same id).

        Raises:
            ValueError: W&B cannot be reached and `tracking.wandb_required` is set.
        """
        self._config = config
        self._run_config = dict(run_config)
        self._run = self._start(run_id)
        self._run.define_metric(STEP_KEY)
        self._run.define_metric("*", step_metric=STEP_KEY)

    @property
    def run_id(self) -> str:
        """What a checkpoint keeps so that a resumed run goes on in the same W&B run."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of `step`; an explicit step, because a call without one would move W&B's own counter."""
        self._run.log({**metrics, STEP_KEY: step}, step=step)

    def close(self, exit_code: int = 0) -> None:
        """Flush and end the run; an exit code other than 0 marks it as failed."""
        self._run.finish(exit_code=exit_code)
        # `finish` may return before the file of an offline run is whole; ending W&B's service waits for it.
        wandb.teardown()

    def _start(self, run_id: str | None) -> wandb.Run:
        if self._config.wandb == "offline":
            return self._init("offline", run_id)
        mode = wandb.setup().settings.mode
        if mode != "online":
            return self._init(mode, run_id)
        try:
            # Never prompt: the launcher's ranks would wait for an answer that nobody is there to give.
            if not wandb.login(prompt=False):
                raise wandb.Error("no API key; run `wandb login` or set WANDB_API_KEY on the host of rank 0")
            return self._init("online", run_id)
        except wandb.Error as error:
            message = f"tracking.wandb = online: W&B cannot be used: {error}"
            if self._config.wandb_required:
                raise ValueError(f"{message}; tracking.wandb_required=false would record offline") from error
            warnings.warn(f"{message}; recording offline, `wandb sync` uploads it later", stacklevel=4)
        return self._init("offline", run_id)

    def _init(self, mode: Any, run_id: str | None) -> wandb.Run:
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            name=self._config.run_name,
            dir=str(self._config.run_dir),
            config=self._run_config,
            id=run_id,
            resume="allow" if run_id is not None and mode == "online" else None,
            mode=mode,
            # Without its table of every metric at the end: the console had a line per step.
            settings=wandb.Settings(quiet=True),
        )
