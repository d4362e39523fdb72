"""Weights and settings from a Hugging Face folder: safetensors, read tensor by tensor, or GGUF through transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatron_branch.engine.architecture import family_of

_WHOLE = slice(None)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_GGUF_REMEDY = "use the model's safetensors"


class Tensors(Protocol):
    """Named tensors, of which parts can be read."""

    def names(self) -> frozenset[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        ...

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> Tensor:
        """The tensor, or these rows (dimension 0) and columns (dimension 1) of it; it may be a view."""
        ...


class Source:
    """An opened model folder.

    Attributes:
        folder: the folder.
        gguf_file: name of the GGUF file in it, or None for safetensors.
        config: its settings, as transformers reads them.
        tensors: its weights.
    """

    def __init__(self, folder: Path, gguf_file: str | None, config: PretrainedConfig, tensors: Tensors) -> None:
        self.folder = folder
        self.gguf_file = gguf_file
        self.config = config
        self.tensors = tensors

    def __str__(self) -> str:
        return str(self.folder if self.gguf_file is None else self.folder / self.gguf_file)


def open_source(path: str | Path, gguf_file: str | None = None, *, any_family: bool = False) -> Source:
    """Open a model folder; nothing but the settings is read yet.

    Args:
        path: the folder.
        gguf_file: name of a GGUF file in it.
        any_family: of safetensors, take any model type that transformers knows.

    Raises:
        ValueError: no such folder, settings or weights missing or unreadable, or a model type that is not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model.path = {folder}: is not a folder; give a folder with config.json and safetensors")
    if gguf_file is not None:
        return _open_gguf(folder, gguf_file)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder} has no config.json; give a Hugging Face model folder" + _gguf_hint(folder))
    settings = _read_json(config_file)
    if not any_family:
        family_of(settings.get("model_type"), source=str(config_file))  # before transformers acts on an unknown one
    tensors = _SafetensorFiles(_weight_files(folder))
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds here, all of them about this file
        raise ValueError(f"{config_file} cannot be read by transformers: {error}; fix the config") from error
    return Source(folder, None, config, tensors)


class _SafetensorFiles:
    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open = {}
        for file in sorted(set(files.values())):
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}; download it again") from error
        for name, file in files.items():
            if name not in self._open[file].keys():  # noqa: SIM118 (not a dict)
                raise ValueError(f"{file} lacks {name}, which {_INDEX} places there; download the model again")

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> Tensor:
        part = self._open[self._files[name]].get_slice(name)
        return part[rows] if len(part.get_shape()) == 1 else part[rows, columns]


class _GgufFile:
    """Dequantised to float32 in memory, all at once, when the first name is asked for."""

    def __init__(self, folder: Path, name: str, *, tied: bool, count: int) -> None:
        self._folder, self._name, self._tied, self._count = folder, name, tied, count

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        file = self._folder / self._name
        with _reading_gguf(file):
            model = AutoModelForCausalLM.from_pretrained(self._folder, gguf_file=self._name, dtype=torch.float32)
        tensors = dict(model.state_dict())
        if self._tied:
            del tensors["lm_head.weight"]  # the same storage as the embedding
        if len(tensors) != self._count:  # transformers skips tensors that it does not know and makes up missing ones
            raise ValueError(f"{file} has {self._count} tensors, the model has {len(tensors)}; {_GGUF_REMEDY}")
        return tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> Tensor:
        tensor = self._tensors[name]
        return tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]


def _weight_files(folder: Path) -> dict[str, Path]:
    """File of each tensor name."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map; download the model again")
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            raise ValueError(f"{index} names files that are missing: {', '.join(missing)}; download them")
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / _SINGLE
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), single)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{single} is not a readable safetensors file: {error}; download it again") from error
    if any(folder.glob("*.bin")):
        raise ValueError(
            f"{folder} has pickled weights only (*.bin), which can run code when read; convert it once with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} is an adapter without its base model; merge it into the base model first")
    raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}; give a complete model folder" + _gguf_hint(folder))


def _open_gguf(folder: Path, name: str) -> Source:
    file = folder / name
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the name of a GGUF file in {folder}")
    with _reading_gguf(file):
        keys, tensors = _gguf_names(file)
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
    family_of(config.model_type, source=str(file))
    scaling = sorted(key for key in (*keys, *tensors) if ".rope.scaling." in key or key.startswith("rope_freqs"))
    if scaling:  # transformers drops these without a word
        raise ValueError(
            f"{file}: {', '.join(scaling)}: scaled rotary positions are not read from GGUF; {_GGUF_REMEDY}"
        )
    contents = _GgufFile(folder, name, tied=config.tie_word_embeddings, count=len(tensors))
    return Source(folder, name, config, contents)


def _gguf_names(file: Path) -> tuple[list[str], list[str]]:
    """Names of the settings and of the tensors."""
    from gguf import GGUFReader  # an optional package

    reader = GGUFReader(file)
    return list(reader.fields), [tensor.name for tensor in reader.tensors]


@contextmanager
def _reading_gguf(file: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{file} needs packages that are not there ({error}); install the extra 'gguf'") from error
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        raise ValueError(f"{file} cannot be read as GGUF: {error}; give another file") from error


def _gguf_hint(folder: Path) -> str:
    names = sorted(file.name for file in folder.glob("*.gguf"))
    return f", or set the GGUF file to {names[0]!r}" if names else ""


def _read_json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object; download it again")
    return value
