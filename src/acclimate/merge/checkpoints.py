"""Checkpoints of a whole model: read one tensor at a time, match the names of two of them, and write one with the same shards.

Safetensors files are read by their headers. Pickled state dicts (.bin, .pt, .pth) are opened without running code from them, mapped
where their format allows it; what is written is always safetensors.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InputError
from acclimate.merge.adapter_files import (
    CONFIG,
    DTYPES,
    StreamedFile,
    cached_snapshot,
    count_not_finite,
    may_be_hub_id,
    open_safetensors,
)
from acclimate.runs import read_json

INDEX = "model.safetensors.index.json"
Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]

_PREFIXES = ("module.", "_orig_mod.", "base_model.model.")  # DataParallel, torch.compile, PEFT
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TRAINING_STATE = re.compile(r"training_args\.bin|(optimizer|scheduler|scaler|rng_state).*")
# Tensors that only the storage formats of GPTQ, AWQ, bitsandbytes, compressed-tensors and the like have.
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|SCB|weight_format|weight_packed|weight_scale|weight_scale_inv|absmax|quant_map|quant_state\..*)$"
)
_NOT_COPIED = (".safetensors", *_PICKLED, ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
REPORT = "soup_report.json"
_OURS = {CONFIG, REPORT, "journal.jsonl", "scores.json", "report.html"}  # written anew, or about the input alone
_NOT_COPIED_DIRECTORIES = re.compile(r"\..*|checkpoint-\d+|onnx|openvino")


@dataclass(eq=False)
class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a model by name, each read when it is asked for.

    `shards` has the names by the file they are to be written to; `tied` the groups of names that share one storage.
    """

    label: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    shards: dict[str, list[str]]
    read: Callable[[str], Tensor]
    files: list[Path] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def checked(self, name: str, infinity: bool = False) -> Tensor:
        """Read a tensor; raises InputError where it holds NaN or, unless it is allowed, infinity."""
        value = self.read(name)
        if bad := count_not_finite(value, infinity):
            raise InputError(
                f"'{name}' in '{self.places.get(name, self.label)}' has {bad} values that are not finite numbers"
            )
        return value

    def groups(self) -> list[list[str]]:
        """All names in the order of the shards, those of one storage together."""
        others = {name: group for group in self.tied for name in group}
        found, seen = [], set()
        for names in self.shards.values():
            for name in names:
                if name not in seen:
                    found.append(others.get(name, [name]))
                    seen.update(found[-1])
        return found

    def identity(self) -> list[list[Any]]:
        """What tells the files from others and from later versions of themselves, without reading them."""
        return [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
            for path, stat in ((path, path.stat()) for path in self.files)
        ]


def in_memory(label: str, state: Mapping[str, Tensor]) -> Checkpoint:
    """A checkpoint whose tensors are at hand."""
    storages: dict[Any, list[str]] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"'{label}' is not a state_dict: its entry '{name}' is {type(value).__name__}, not a tensor"
            )
        if value.numel() and value.device.type != "meta":
            key = (value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride())
            storages.setdefault(key, []).append(name)
    checkpoint = Checkpoint(
        label,
        {name: tuple(value.shape) for name, value in state.items()},
        {name: value.dtype for name, value in state.items()},
        {"model.safetensors": list(state)},
        lambda name: state[name].detach(),
        tied=[names for names in storages.values() if len(names) > 1],
    )
    _refuse_quantised(checkpoint)
    return checkpoint


def as_checkpoint(source: str | Path | Mapping[str, Tensor], label: str) -> Checkpoint:
    """A path is opened; a state dict gets `label` for a name."""
    if isinstance(source, Checkpoint):
        return source
    return open_checkpoint(source) if isinstance(source, str | Path) else in_memory(label, source)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A directory, a file, a run of acclimate, an embedded model or a hub id in the local cache.

    The weights are safetensors (one file, or shards with an index) or a pickled state dict.
    """
    where = _find(path)
    if where.is_file():
        files = _indexed(where) if where.name.endswith(".index.json") else [where]
    else:
        config = read_json(where / "config.json") if (where / "config.json").exists() else {}
        if isinstance(config, dict) and config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "quantised")
            raise InputError(f"'{where}' is quantised ({method}): its weights cannot be edited. Dequantise it first")
        files = _weight_files(where)
    label = "/".join(where.parts[-2:])
    if files[0].suffix == ".gguf":
        raise InputError(f"'{files[0]}' is a GGUF file. Convert it to safetensors (dequantised) first")
    checkpoint = Checkpoint(label, {}, {}, {}, lambda name: readers[name](name), files)
    readers: dict[str, Callable[[str], Tensor]] = {}
    for file in files:
        part, read = _open_file(file, label)
        for name in part:
            if name in readers:
                raise InputError(
                    f"'{name}' is in two files: '{checkpoint.places[name]}' and '{file}'. Name one of them"
                )
            checkpoint.shapes[name], checkpoint.dtypes[name] = part.shapes[name], part.dtypes[name]
            checkpoint.places[name], readers[name] = str(file), read
        checkpoint.shards[_written_as(file)] = list(part)
        checkpoint.tied += part.tied
    _refuse_quantised(checkpoint)
    return checkpoint


def _find(path: str | Path) -> Path:
    from acclimate import models

    if str(path) in models.EMBEDDED:
        return Path(models.resolve(str(path)))
    where = Path(path)
    if (where / "run.json").exists() and (where / "model").is_dir():  # a run of acclimate that trained all weights
        return where / "model"
    if where.exists():
        return where
    if may_be_hub_id(where) and (cached := cached_snapshot(where)) is not None:
        return cached
    raise InputError(f"no file or directory '{path}', and no model of this name in the local hub cache")


def _weight_files(where: Path) -> list[Path]:
    for index, single in ((INDEX, "model.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model.bin")):
        if (where / index).exists():
            return _indexed(where / index)
        if (where / single).exists():
            return [where / single]
    files = sorted(path for path in where.iterdir() if path.is_file() and not _TRAINING_STATE.fullmatch(path.name))
    safetensors = [path for path in files if path.suffix == ".safetensors"]
    if safetensors:
        return safetensors
    pickled = [path for path in files if path.suffix in (*_PICKLED, ".gguf")]
    if len(pickled) == 1:
        return pickled
    if pickled:
        raise InputError(
            f"'{where}' has {len(pickled)} weight files: {_some([p.name for p in pickled])}. Name one of them"
        )
    raise InputError(f"'{where}' has no weights (model.safetensors, or a .bin or .pt file)")


def _indexed(index: Path) -> list[Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise InputError(f"'{index}' has no weight_map")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.exists():
            raise InputError(f"'{index}' names '{file.name}', which is not there: the checkpoint is incomplete")
    return files


def _open_file(file: Path, label: str) -> tuple[Checkpoint, Callable[[str], Tensor]]:
    if file.suffix != ".safetensors":
        part = in_memory(str(file), _unpickled(file))
        return part, part.read
    header, read = open_safetensors(file)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise InputError(
                f"'{name}' in '{file}' is stored as {entry['dtype']}: it cannot be edited. Dequantise the checkpoint first"
            )
    part = Checkpoint(
        label,
        {name: tuple(entry["shape"]) for name, entry in header.items()},
        {name: DTYPES[entry["dtype"]] for name, entry in header.items()},
        {},
        read,
    )
    return part, read


def _unpickled(file: Path) -> Mapping[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the old format, which cannot be mapped
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"cannot read '{file}' without running code from it: {reason}. Save its state_dict as safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise InputError(f"'{file}' holds {type(content).__name__}, not a state_dict")
    return content


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    for name, dtype in checkpoint.dtypes.items():
        packed = dtype in (torch.int8, torch.uint8) and name.endswith("weight")  # not the masks that GPT-2 has
        packed = packed or (dtype.is_floating_point and dtype.itemsize == 1)
        if packed or _QUANTISED.search(name):
            raise InputError(
                f"'{checkpoint.places.get(name, checkpoint.label)}' is quantised: '{name}' is {str(dtype).removeprefix('torch.')}. "
                "Dequantise it first"
            )


def _written_as(file: Path) -> str:
    if file.suffix == ".safetensors":
        return file.name
    return re.sub(r"^pytorch_model", "model", file.stem) + ".safetensors"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def counterparts(base: Checkpoint, tuned: Checkpoint) -> dict[str, str | None]:
    """The base's name for each of the tuned names: the same, or the same without what a wrapper has put before it."""
    plain: dict[str, str] = {}
    for name in base:
        plain.setdefault(_without_prefixes(name), name)
    return {name: name if name in base.shapes else plain.get(_without_prefixes(name)) for name in tuned}


def _without_prefixes(name: str) -> str:
    while found := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(found)
    return name


class ShardedWriter:
    """Safetensors files in a directory whose tensors' shapes are known beforehand; they are written in any order."""

    def __init__(self, directory: Path, layouts: Mapping[str, Layout]) -> None:
        self.stack = contextlib.ExitStack()
        self.files = [
            self.stack.enter_context(StreamedFile(directory / name, layout)) for name, layout in layouts.items()
        ]
        self.owner = {name: file for file in self.files for name in file.header}

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor in its place."""
        self.owner[name].write(name, value)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for file in self.files:
            file.sync()

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def write_index(directory: Path, layouts: Mapping[str, Layout]) -> None:
    """The index of a checkpoint of several shards, as transformers writes it."""
    size = sum(torch.Size(shape).numel() * dtype.itemsize for layout in layouts.values() for _, dtype, shape in layout)
    content = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, layout in layouts.items() for name, _, _ in layout},
    }
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy what is no weight (configuration, tokenizer, pooling layers in directories) and no state of training."""
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if not _NOT_COPIED_DIRECTORIES.fullmatch(path.name):
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        elif not (
            path.name.startswith(".")
            or path.name.endswith(_NOT_COPIED)
            or _TRAINING_STATE.fullmatch(path.name)
            or path.name in _OURS
        ):
            shutil.copyfile(path, target / path.name)
