"""One place to log: every row goes to the console, the JSON lines and W&B, or on other ranks nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import yaml

from megatron_branch.tracking.config import TrackingConfig
from megatron_branch.tracking.console import Console, Header
from megatron_branch.tracking.jsonl import JsonlSink
from megatron_branch.tracking.metrics import check_keys

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


class Sink(Protocol):
    """Where rows go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of a step."""

    def close(self, exit_code: int = 0) -> None:
        """Write what is still held; other than 0: the run failed."""


class Tracker:
    """Fans rows out to its sinks; `with` closes them, and tells them when the block raised."""

    def __init__(
        self, sinks: Sequence[Sink] = (), *, console: Console | None = None, wandb_id: str | None = None
    ) -> None:
        """Without sinks and console (a rank that does not write) every call only checks its arguments."""
        self._sinks = tuple(sinks) if console is None else (*sinks, console)
        self._console = console
        self._step = 0
        self.wandb_id = wandb_id

    def header(self, header: Header) -> None:
        """Say what runs, before the first step."""
        if self._console is not None:
            self._console.header(header)

    def note(self, name: str, text: str) -> None:
        """Say something that happens once or seldom, in a line of its own on the console."""
        if self._console is not None:
            self._console.note(name, text)

    @contextmanager
    def progress(self, step: int, actions: int) -> Iterator[Callable[[], None]]:
        """A bar over the `actions` of a step; the block calls what it is given once per action."""
        if self._console is None:
            yield lambda: None
        else:
            with self._console.progress(step, actions) as advance:
                yield advance

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the one row of an optimizer step.

        Args:
            step: the global step, larger than that of the row before.
            metrics: values by key; what does not exist in this step is left out.

        Raises:
            KeyError: a key is not declared in `metrics.py`.
            OSError: a row cannot be written.
        """
        check_keys(metrics)
        assert step > self._step, f"row of step {step} after that of step {self._step}: one row per step, in order"
        self._step = step
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self, exit_code: int = 0) -> None:
        """Close every sink, also when one of them fails to."""
        sinks, self._sinks = self._sinks, ()
        failures = []
        for sink in sinks:
            try:
                sink.close(exit_code)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


def make_tracker(
    config: TrackingConfig,
    *,
    writer: bool,
    steps: int,
    run_config: Mapping[str, Any],
    first_step: int = 1,
    wandb_id: str | None = None,
) -> Tracker:
    """The tracker of this rank.

    Args:
        config: the section `tracking`.
        writer: this is the one rank that writes; it needs the values, wherever the loss is computed.
        steps: the run's last step.
        run_config: the whole configuration as plain values, written to config.yaml and shown by W&B.
        first_step: the step this process starts with; more than 1 when it resumes.
        wandb_id: the W&B run to continue, from the checkpoint.

    Raises:
        ValueError: the run folder cannot be written, or W&B is required and cannot be reached.
    """
    if not writer:
        return Tracker()
    sinks: list[Sink] = [JsonlSink(config.run_dir / METRICS_FILE, first_step=first_step)]
    text = yaml.safe_dump(dict(run_config), sort_keys=False)
    (config.run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    if config.wandb == "disabled":
        return Tracker(sinks, console=Console(steps=steps))
    from megatron_branch.tracking.wandb_sink import WandbSink  # costs seconds, and a run without W&B needs none of it

    sink = WandbSink(config, run_config=run_config, run_id=wandb_id)
    return Tracker([*sinks, sink], console=Console(steps=steps), wandb_id=sink.run_id)
