"""What a person sees: what runs, then a line per step.

Inside steps there is a progress bar on a terminal; a log gets plain lines without control characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_HEARTBEAT_S = 30.0
_PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers")


@dataclass(frozen=True, slots=True)
class Header:
    """What is said before the first step.

    Attributes:
        topology: parallel sizes, ZeRO stage and devices.
        trees: statistics of the first step's trees.
        peak_bytes: predicted peak by kind on the fullest rank, in bytes.
        placement: where that rank keeps them.
    """

    topology: str
    trees: str
    peak_bytes: Mapping[str, int]
    placement: str = ""


class Console:
    """Writes to a stream; colours and a bar only where it is a terminal."""

    def __init__(
        self, *, steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`steps` is the number of the run's last step; `stream` defaults to standard output."""
        stream = sys.stdout if stream is None else stream
        self._steps = steps
        self._terminal = stream.isatty()
        self._rich = RichConsole(
            file=stream, force_terminal=self._terminal, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._clock = clock
        self._seconds: list[float] = []

    def header(self, header: Header) -> None:
        """Print versions, topology, tree statistics and peak bytes."""
        versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
        total = sum(header.peak_bytes.values())
        kinds = ", ".join(f"{kind} {bytes_text(count)}" for kind, count in header.peak_bytes.items())
        self._print(f"versions  python {python_version()}, {versions}")
        self._print(f"topology  {header.topology}")
        self._print("trees     " + header.trees.replace("\n", "\n" + " " * 10))
        placed = f"; placement: {header.placement}" if header.placement else ""
        self._print(f"peak      {bytes_text(total)}" + (f" ({kinds})" if kinds else "") + placed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step."""
        self._seconds.append(metrics["perf/time_per_step"])
        eta_s = (self._steps - step) * sum(self._seconds) / len(self._seconds)
        self._print(step_line(step, metrics, steps=self._steps, eta_s=eta_s))

    def note(self, name: str, text: str) -> None:
        """Print a line of the form of the header's."""
        self._print(f"{name:10}{text}")

    def close(self, exit_code: int = 0) -> None:
        """Nothing is held open."""

    @contextmanager
    def progress(self, step: int, actions: int) -> Iterator[Callable[[], None]]:
        """Show how many of a step's `actions` are done; the block calls what it is given once per action.

        A log gets a plain line at most every 30 s, so short steps leave none.
        """
        title = f"step {step}/{self._steps}"
        if self._terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=self._rich, transient=True) as bar:
                task = bar.add_task(title, total=actions)
                yield lambda: bar.advance(task)
            return
        done, said = 0, self._clock()

        def advance() -> None:
            nonlocal done, said
            done += 1
            if self._clock() - said >= _HEARTBEAT_S:
                said = self._clock()
                self._print(f"{title} | {done}/{actions} actions")

        yield advance

    def _print(self, line: str) -> None:
        self._rich.print(line)
        self._rich.file.flush()


def step_line(step: int, metrics: Mapping[str, float], *, steps: int, eta_s: float) -> str:
    """The line of a step; what its metrics do not hold (rewards, say, where the rows give advantages) is left out."""
    parts = [f"step {step}/{steps}", f"{metrics['perf/time_per_step']:.3g} s"]
    for key, name, form in (
        ("actor/pg_loss", "loss", ".3g"),
        ("reward/mean", "reward", ".3g"),
        ("actor/grad_norm", "grad", ".2g"),
    ):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:{form}}")
    if "perf/total_num_tokens" in metrics:
        parts.append(_tokens_text(metrics["perf/total_num_tokens"], metrics.get("branch/tree_token_ratio")))
    if "perf/throughput" in metrics:
        parts.append(f"{_scaled(metrics['perf/throughput'])} tok/s")
    if "perf/mfu/actor" in metrics:
        parts.append(f"mfu {100 * metrics['perf/mfu/actor']:.1f}%")
    if "branch/state_bytes_peak" in metrics:
        parts.append(f"state {bytes_text(metrics['branch/state_bytes_peak'])}")
    return " | ".join([*parts, f"eta {duration_text(eta_s)}"])


def bytes_text(count: float) -> str:
    """`11.2 GiB`, `512 B`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {units[power]}"


def duration_text(seconds: float) -> str:
    """`45s`, `26m`, `3h05m`."""
    if round(seconds) < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _tokens_text(logical: float, ratio: float | None) -> str:
    text = f"tokens {_scaled(logical)}"
    if ratio is None:
        return text
    return f"{text} (computed {_scaled(logical / ratio, like=logical)}, x{ratio:.1f})"


def _scaled(value: float, *, like: float | None = None) -> str:
    """Three digits with a decimal suffix, that of `like` where given."""
    size = value if like is None else like
    scale, suffix = next(((s, x) for s, x in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= s), (1.0, ""))
    scaled = value / scale
    digits = 0 if scaled >= 100 or not suffix else 1 if scaled >= 10 else 2
    return f"{scaled:.{digits}f}{suffix}"
