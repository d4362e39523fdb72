"""The configuration: one value, read from one YAML file and dotted overrides.

Each package defines its own section; this module composes them, reads them and says what is wrong with them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from megatron_branch.attention.config import AttentionConfig
from megatron_branch.engine.config import CheckpointConfig, ModelConfig, OptimizerConfig, ParallelConfig, ZeroConfig
from megatron_branch.objective.config import ObjectiveConfig
from megatron_branch.plan.limits import BranchConfig
from megatron_branch.rollouts.config import DataConfig
from megatron_branch.state.config import StateConfig
from megatron_branch.tracking.config import TrackingConfig


class Config(BaseModel):
    """Everything a run is told, apart from a DeepSpeed file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    branch: BranchConfig = BranchConfig()
    state: StateConfig = StateConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    zero: ZeroConfig = ZeroConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    attention: AttentionConfig = AttentionConfig()
    steps: int | None = Field(default=None, ge=1, description="optimizer steps; null: all that `data.epochs` gives")
    seed: int = Field(default=0, ge=0, description="seed of everything random that is not data order")
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds in which some rank must get on by an action or by another part of a step (planning, a "
        "checkpoint); else the job hangs, and ends: more than the longest of them; waiting for others is no fault",
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.zero.stage == 3 and self.parallel.pp > 1:
            raise ValueError(
                f"zero.stage=3 with parallel.pp={self.parallel.pp}: ZeRO-3 gathers each layer's parameters on all "
                "ranks at the same pass, while pipeline stages run different passes at the same time; "
                "set zero.stage to 2 or less, or parallel.pp=1"
            )
        if self.zero.stage == 3 and self.branch.activations != "recompute":
            raise ValueError(
                f"zero.stage=3 with branch.activations={self.branch.activations}: data-parallel ranks meet inside "
                "every pass, and a replay that is a backward alone matches no pass of a rank with other work; "
                "set branch.activations=recompute, or zero.stage to 2 or less"
            )
        if self.model.host == "transformers":
            self._transformers_can()
        if self.steps is not None and self.optimizer.warmup_steps > self.steps:
            raise ValueError(f"optimizer.warmup_steps={self.optimizer.warmup_steps} must not exceed steps={self.steps}")
        return self

    def _transformers_can(self) -> None:
        """Raise ValueError for a setting that only the Megatron host has."""
        sizes, branch = self.parallel, self.branch
        wanted = {
            f"parallel.tp={sizes.tp}": (sizes.tp > 1, "Hugging Face's layers are not split; set parallel.tp=1"),
            f"parallel.pp={sizes.pp}": (sizes.pp > 1, "Hugging Face's models have one stage; set parallel.pp=1"),
            f"branch.activations={branch.activations}": (
                branch.activations != "recompute",
                "bytes of retained graphs are known for Megatron's layers only; set branch.activations=recompute",
            ),
            "branch.recompute_layers=true": (branch.recompute_layers, "layers are not recomputed; set it to false"),
            f"model.gguf_file={self.model.gguf_file}": (
                self.model.gguf_file is not None,
                "weights are read from safetensors; remove model.gguf_file",
            ),
        }
        for setting, (given, way_out) in wanted.items():
            if given:
                raise ValueError(f"{setting} with model.host=transformers: {way_out}, or use model.host=megatron")


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `1e-6` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides, whose values are YAML too.

    Raises:
        ValueError: the file cannot be read, or a key or a value is wrong; the message lists every fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"config {path}: cannot be read ({error.strerror}); name a YAML file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path}: is not UTF-8 text: {error}; save it as UTF-8") from None
    values = _parse_yaml(text, f"config {path}")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ValueError(f"config {path}: must be a mapping of sections, not {type(values).__name__}")
    return make_config(values, overrides, source=f"config {path}")


def make_config(values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "config") -> Config:
    """Build the configuration from nested values and overrides; `source` names them in errors.

    Values keep their YAML types: a number in quotes or a truth value is no number.

    Raises:
        ValueError: a key or a value is wrong; the message lists every fault with key, value and rule.
    """
    merged = json.loads(json.dumps(values, default=str))
    for override in overrides:
        _apply(merged, override)
    try:
        return Config.model_validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        faults = [_origin(fault, overrides) + _describe(fault) for fault in error.errors()]
    if len(faults) == 1:
        raise ValueError(f"{source}: {faults[0]}")
    raise ValueError("\n  ".join([f"{source}: {len(faults)} errors", *faults]))


def config_keys() -> list[str]:
    """All dotted keys, in order of declaration."""
    return [key for key, _ in _fields()]


def config_table() -> str:
    """The keys as a Markdown table, for the README."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, field in _fields():
        default = "required" if field.default is PydanticUndefined else f"`{_yaml_text(field.default)}`"
        lines.append(f"| `{key}` | {_values(field)} | {default} | {field.description or ''} |")
    return "\n".join(lines)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{source}: not valid YAML: {error.problem}{place}; correct it") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {error}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in place."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"override {override!r}: must be key=value or section.key=value")
    at: Any = values
    for part in parts[:-1]:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ValueError(f"override {override!r}: {part} is a value, not a section")
    at[parts[-1]] = _parse_yaml(text, f"override {override!r}")


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((f"{name}.{key}", sub) for key, sub in field.annotation.model_fields.items())
        else:
            yield name, field


def _origin(fault: ErrorDetails, overrides: Sequence[str]) -> str:
    """The last override that set the faulty value; empty if none did, or if several keys together are at fault."""
    path = ".".join(str(part) for part in fault["loc"]) + "."
    for override in reversed(overrides if fault["type"] not in ("missing", "value_error") else ()):
        key = override.partition("=")[0].strip() + "."
        if path.startswith(key) or key.startswith(path):
            return f"override {override!r}: "
    return ""


def _describe(fault: ErrorDetails) -> str:
    """One fault in one line: key, value, rule."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        close = _close_keys(key)
        return f"{key}: unknown key; " + (f"did you mean {' or '.join(close)}?" if close else "remove it")
    if fault["type"] == "missing":
        keys = [
            full for full, field in _fields() if field.is_required() and (full == key or full.startswith(f"{key}."))
        ]
        return f"{key}: required; set it in the file or as {'=VALUE, '.join(keys)}=VALUE"
    if fault["type"] == "value_error":  # a rule between keys, which names them itself
        return fault["msg"].removeprefix("Value error, ")
    return f"{key} = {json.dumps(fault['input'], default=str)}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _close_keys(key: str) -> list[str]:
    known = config_keys()
    last = key.rpartition(".")[2]
    same_name = [full for full in known if full.rpartition(".")[2] == last]
    sections = [name for name in Config.model_fields if name not in known]
    spelled_alike = difflib.get_close_matches(key, known + sections, n=3, cutoff=0.7)
    by_last = {full.rpartition(".")[2]: full for full in known}
    last_alike = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=2, cutoff=0.75)]
    return list(dict.fromkeys(same_name + spelled_alike + last_alike))[:3]


def _yaml_text(value: Any) -> str:
    if isinstance(value, BaseModel | Path):
        return str(value)
    return json.dumps(value)


def _values(field: FieldInfo) -> str:
    """What a key accepts: the choices, or the type with its range."""
    choices, names = [], []
    for kind in _alternatives(field.annotation):
        if get_origin(kind) is Literal:
            choices += [f"`{choice}`" for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            names.append(f"list of {len(get_args(kind))}")
        else:
            names.append(
                {"NoneType": "null", "bool": "true, false", "Path": "path", "str": "text"}.get(
                    kind.__name__, kind.__name__
                )
            )
    bounds = [
        f"{sign} {getattr(rule, attribute):g}"
        for rule in field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, attribute, None) is not None
    ]
    if bounds:
        names[0] = f"{names[0]} {', '.join(bounds)}"
    return ", ".join(choices + names)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)
