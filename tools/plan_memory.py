"""Plan a step on paper: bytes per rank by kind, seconds by phase, and the fastest layout that fits a machine.

Inputs: a model (a name of configs/models, a Hugging Face folder or its config.json), a machine, the shape of a step,
and configuration keys as key.sub=value: what is given is not searched.
Outputs: tables on the console, the winner's configuration as YAML that launch/train.py --dry_run takes (its model.path
and data.rollouts must be yours), and with --json FILE an object with `winner`, `runners_up`, `rejected` and what was
assumed.

Everything here is a plan by the program's own formulas and stated rates. Nothing is measured but, for
`--hardware this_machine`, its rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_branch.engine.architecture import Architecture, architecture_from_config
from megatron_branch.engine.estimate import RankBytes, StepSeconds
from megatron_branch.engine.layout_search import Candidate, Found, LayoutSearch, Machine, StepShape
from megatron_branch.engine.quiet import silence_missing_accelerators
from megatron_branch.plan.hardware import GIB, HARDWARE, THIS_MACHINE, Assumptions, parse_hardware
from megatron_branch.plan.this_machine import measure_this_machine
from megatron_branch.tracking.console import bytes_text, duration_text

MODELS = Path(__file__).parents[1] / "configs" / "models"
RUNNERS_UP = 4
AXES = {
    "tp": "parallel.tp",
    "cp": "parallel.cp",
    "pp": "parallel.pp",
    "dp": "parallel.dp",
    "zero": "zero.stage",
    "chunk_tokens": "branch.chunk_tokens",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name in configs/models, Hugging Face folder, or config.json")
    parser.add_argument("--hardware", required=True, help=f"NUMBERxNAME, of {', '.join([*HARDWARE, THIS_MACHINE])}")
    parser.add_argument("--prompt", type=int, required=True, help="prompt tokens that a group shares")
    parser.add_argument("--response", type=int, required=True, help="response tokens of each rollout")
    parser.add_argument("--rollouts", type=int, required=True, help="rollouts of a group")
    parser.add_argument("--groups", type=int, default=1, help="groups of a step (default 1)")
    parser.add_argument("--gradient", choices=["exact", "detached"], default="exact", help="default exact")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default bfloat16")
    for option, key in AXES.items():
        parser.add_argument(f"--{option}", type=int, help=f"fix {key} instead of searching it")
    for part in fields(Assumptions):
        parser.add_argument(f"--assume_{part.name}", type=float, help=f"default {part.default}; see plan/hardware.py")
    parser.add_argument("--host_memory_gib", type=float, help="host memory per device (default: assumed 256)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="configuration keys")
    return parser.parse_intermixed_args(arguments)


def read_model(name: str) -> Architecture:
    """The model of a name, folder or file.

    Raises:
        ValueError: there is none, or it is not supported.
    """
    from transformers import AutoConfig

    path = Path(name)
    if (MODELS / f"{name}.json").is_file():
        path = MODELS / f"{name}.json"
    elif (path / "config.json").is_file():
        path = path / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MODELS.glob("*.json")))
        raise ValueError(f"--model {name}: is no file, no folder with a config.json, and none of {known}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = AutoConfig.for_model(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--model {path}: is no model's config.json: {error}") from None
    return architecture_from_config(config, source=str(path))


def shared_values(options: argparse.Namespace) -> dict[str, Any]:
    """What all candidates have in common, as nested values of the configuration."""
    values: dict[str, Any] = {
        "model": {"path": f"models/{Path(options.model).name}", "dtype": options.dtype},
        "data": {"rollouts": "data/rollouts.jsonl", "groups_per_step": options.groups},
        "branch": {"gradient": options.gradient},
    }
    for option, key in AXES.items():
        if getattr(options, option) is not None:
            section, name = key.split(".")
            values.setdefault(section, {})[name] = getattr(options, option)
    for override in options.overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals:
            raise ValueError(f"override {override!r}: must be key=value or section.key=value")
        at = values.setdefault(section, {}) if dot else values
        at[name if dot else section] = yaml.safe_load(text)
    return values


def machine_of(options: argparse.Namespace) -> Machine:
    """The machine that the command line names.

    Raises:
        ValueError: it does not exist.
    """
    count, name = parse_hardware(options.hardware)
    given = {part.name: getattr(options, f"assume_{part.name}") for part in fields(Assumptions)}
    assumed = replace(Assumptions(), **{name: value for name, value in given.items() if value is not None})
    if name == THIS_MACHINE:
        hardware = measure_this_machine(count, Path.cwd())
        # Products were measured, so all of that rate is reached.
        assumed = replace(assumed, gemm=options.assume_gemm or 1.0)
    else:
        hardware = HARDWARE[name]
    if options.host_memory_gib is not None:
        hardware = replace(hardware, host_bytes=round(options.host_memory_gib * GIB))
    return Machine(hardware, count, assumed)


def bytes_table(candidate: Candidate, room: Mapping[str, float]) -> str:
    """Bytes per rank by kind, of every pipeline stage."""
    names = list(dict.fromkeys(kind for stage in candidate.stages for kind in stage.device))
    head = "".join(f"{f'stage {number}':>12}" for number in range(len(candidate.stages)))
    lines = [f"{'bytes per rank':<28}{head if len(candidate.stages) > 1 else f'{str():>12}'}"]

    def line(name: str, sizes: Sequence[float]) -> None:
        if any(sizes):
            lines.append(f"  {name:<26}" + "".join(f"{bytes_text(size):>12}" for size in sizes))

    for name in names:
        line(name, [stage.device.get(name, 0) for stage in candidate.stages])
    line("device, while passes run", [sum(stage.device.values()) for stage in candidate.stages])
    line("device, at the update", [stage.update for stage in candidate.stages])
    line("host", [stage.host for stage in candidate.stages])
    line("disk", [stage.disk for stage in candidate.stages])
    lines.append("  room: " + ", ".join(f"{place} {bytes_text(size)}" for place, size in room.items()))
    return "\n".join(lines)


def seconds_table(seconds: StepSeconds) -> str:
    """Seconds by phase and part, of the busiest pipeline stage."""
    parts = [name for name in next(iter(seconds.phases.values())).parts()]
    shown = [name for name in parts if any(phase.parts()[name] for phase in seconds.phases.values())]
    lines = [f"{'seconds':<28}" + "".join(f"{phase:>12}" for phase in seconds.phases)]
    for name in shown:
        label = "hidden copies of state" if name == "hidden_copies" else name.replace("_", " ")
        lines.append(f"  {label:<26}" + "".join(f"{phase.parts()[name]:>12,.1f}" for phase in seconds.phases.values()))
    lines.append(f"  {'in all':<26}" + "".join(f"{phase.total:>12,.1f}" for phase in seconds.phases.values()))
    lines.append(f"  waiting for other stages {seconds.waiting:,.1f}, reduction and update {seconds.update:,.1f}")
    lines.append(f"  step {seconds.total:,.0f} s ({duration_text(seconds.total)})")
    return "\n".join(lines)


def one_line(candidate: Candidate) -> str:
    """A candidate in a table of candidates."""
    config, sizes = candidate.config, candidate.config.parallel
    layout = f"tp {sizes.tp} cp {sizes.cp} pp {sizes.pp} dp {sizes.dp}"
    zero = f"ZeRO {config.zero.stage}" + (", reduced in every pass" if config.zero.reduce == "pass" else "")
    return (
        f"{layout:<24} {zero}  chunk {config.branch.chunk_tokens:>7,}  {candidate.placement!s:<50}"
        f"  device {bytes_text(candidate.fullest.peak):>10}"
    )


def reasons(candidate: Candidate) -> str:
    """What a candidate misses, and which kinds are largest."""
    missing = ", ".join(f"{bytes_text(size)} over on the {place}" for place, size in candidate.over.items())
    largest = sorted(candidate.fullest.device.items(), key=lambda item: -item[1])[:3]
    return f"{missing} ({', '.join(f'{kind} {bytes_text(size)}' for kind, size in largest)})"


def report(options: argparse.Namespace, machine: Machine, found: Found) -> str:
    """Everything for a person."""
    hardware = machine.hardware
    lines = [
        f"plan, not a measurement: {options.model} on {machine.devices} x {hardware.name}, {options.gradient}, "
        f"{options.groups} x {options.rollouts} rollouts of {options.prompt:,} + {options.response:,} tokens",
        f"rates: {hardware.flops / 1e12:,.4g} TFLOP/s, link {hardware.link_rate / 1e9:,.4g} GB/s, host "
        f"{hardware.host_rate / 1e9:,.4g} GB/s; assumed: "
        + ", ".join(f"{name} {value:g}" for name, value in asdict(machine.assumed).items())
        + f", host memory {bytes_text(hardware.host_bytes)} per device",
        f"looked at {found.looked_at:,} layouts, {len(found.fitting):,} fit",
    ]
    if found.fitting:
        winner = found.fitting[0]
        assert winner.seconds is not None
        lines += ["", "fastest that fits: " + one_line(winner), "", bytes_table(winner, machine.room)]
        lines += ["", seconds_table(winner.seconds), "", "configuration:", yaml_text(winner)]
        lines += ["next best, each of another mesh, ZeRO stage or time of reduction:"]
        lines += [f"  {c.seconds.total if c.seconds else 0:>10,.1f} s  {one_line(c)}" for c in runners_up(found)]
    if found.closest:
        lines += ["", "meshes that do not fit, each as close as it comes:"]
        lines += [f"  {one_line(c)}\n    {reasons(c)}" for c in found.closest.values()]
    if found.refused:
        lines += ["", "refused by rule:", *(f"  {count} x {rule}" for rule, count in found.refused.items())]
    return "\n".join(lines)


def runners_up(found: Found) -> list[Candidate]:
    """The fastest of each other mesh, ZeRO stage and time of reduction."""
    best: dict[Any, Candidate] = {}
    for candidate in found.fitting:
        sizes, zero = candidate.config.parallel, candidate.config.zero
        best.setdefault((sizes.tp, sizes.cp, sizes.pp, sizes.dp, zero.stage, zero.reduce), candidate)
    return list(best.values())[1 : 1 + RUNNERS_UP]


def yaml_text(candidate: Candidate) -> str:
    """The configuration as a file for launch/train.py."""
    return yaml.safe_dump(dict(candidate.values), sort_keys=False).strip() + "\n"


def as_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain values."""
    seconds = candidate.seconds
    return {
        "config": dict(candidate.values),
        "placement": candidate.placement.places,
        "bytes": [_stage_json(stage) for stage in candidate.stages],
        "over": dict(candidate.over),
        "seconds": None
        if seconds is None
        else {
            "total": seconds.total,
            "waiting": seconds.waiting,
            "update": seconds.update,
            "bubble_fraction": seconds.simulation.bubble_fraction,
            "phases": {kind: phase.parts() for kind, phase in seconds.phases.items()},
        },
    }


def _stage_json(stage: RankBytes) -> dict[str, Any]:
    return {"device": stage.device, "host": stage.host, "disk": stage.disk, "update": stage.update, "peak": stage.peak}


def search(options: argparse.Namespace) -> tuple[Machine, Found]:
    """Run the search that the command line asks for.

    Raises:
        ValueError: an option cannot be used.
    """
    for name in ("prompt", "response", "rollouts", "groups"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    machine = machine_of(options)
    step = StepShape(options.prompt, options.response, options.rollouts, options.groups)
    return machine, LayoutSearch(read_model(options.model), step, machine, shared_values(options)).run()


def main(arguments: Sequence[str]) -> int:
    """Run; 0 when a layout fits, 2 when none does, 1 with one line on standard error when asked wrongly."""
    options = parse(arguments)
    silence_missing_accelerators()
    try:
        machine, found = search(options)
    except ValueError as error:
        print(f"plan_memory: {error}", file=sys.stderr)
        return 1
    print(report(options, machine, found))
    if options.json is not None:
        result = {
            "plan": "by formulas and stated rates; nothing was measured but the rates of this_machine",
            "hardware": asdict(machine.hardware),
            "devices": machine.devices,
            "assumed": asdict(machine.assumed),
            "winner": as_json(found.fitting[0]) if found.fitting else None,
            "runners_up": [as_json(candidate) for candidate in runners_up(found)],
            "rejected": [as_json(candidate) for candidate in found.closest.values()],
            "refused": dict(found.refused),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if found.fitting else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
