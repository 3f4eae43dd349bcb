"""PEFT adapter directories: read one tensor at a time, understand them as low-rank pairs, and write one in a stream.

Only the headers are read at first. Files are read, not mapped into memory: pages of a mapped file stay in this process's memory
when they have been touched, and the memory of a merge is to be that of its largest layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InputError
from acclimate.runs import read_json

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."

# What may differ from LoraConfig's defaults: it is understood here, or has no part in the change W + s B A.
UNDERSTOOD = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias", "eva_config",
    "megatron_core", "qalora_group_size",
}  # fmt: skip
# Starts that leave the base model as it is; the others take something out of its weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass
class Adapter:
    """One adapter: its configuration, what tensors it has, and how to read one of them."""

    label: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], Tensor]
    path: Path | None = None  # of the weights

    def sha256(self) -> str:
        """Of the weights' file, in hex."""
        assert self.path is not None
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def finite(self, name: str) -> Tensor:
        """Read a tensor; raises InputError where it holds NaN or infinity."""
        value = self.read(name)
        if count_not_finite(value):
            raise InputError(f"'{name}' of adapter '{self.label}' has values that are not finite numbers")
        return value


def open_adapter(path: str | Path) -> Adapter:
    """A PEFT adapter directory, a run directory of acclimate, or a hub id that is in the local cache."""
    where = _directory(path)
    config = read_json(where / CONFIG)
    label = "/".join(where.parts[-2:])
    if not isinstance(config, dict):
        raise InputError(f"'{where / CONFIG}' is not a JSON object")
    if (where / WEIGHTS).exists():
        return _open_safetensors(label, config, where / WEIGHTS)
    if (where / PICKLED).exists():
        try:
            state = torch.load(where / PICKLED, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise InputError(
                f"cannot read '{where / PICKLED}' without running code from it: {error}. Save the adapter as safetensors"
            ) from error
        adapter = in_memory(label, config, state)
        adapter.path = where / PICKLED
        return adapter
    raise InputError(f"'{where}' has no {WEIGHTS}: it is not a PEFT adapter directory, or was not saved to its end")


def _directory(path: str | Path) -> Path:
    where = Path(path)
    for place in (where, where / "adapter"):
        if (place / CONFIG).exists():
            return place
    if may_be_hub_id(where):
        if (cached := cached_snapshot(where)) is not None:
            return cached
        raise InputError(f"no directory '{path}', and no adapter of this name in the local hub cache")
    raise InputError(f"no {CONFIG} in '{path}': it is not a PEFT adapter directory")


def may_be_hub_id(where: Path) -> bool:
    """Whether a path that is not there could be a name on the hub: owner/name."""
    return not where.exists() and len(where.parts) == 2 and not where.is_absolute()


def cached_snapshot(name: Path) -> Path | None:
    """The directory of a hub id in the local cache; None where it is not there. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def count_not_finite(value: Tensor, infinity: bool = False) -> int:
    """How many values are NaN or, unless it is allowed, infinite."""
    # a sum is ten times as fast as the look at every value, which follows only where the sum is not finite
    if not value.is_floating_point() or value.sum().isfinite():
        return 0
    return int((value.isnan() if infinity else ~value.isfinite()).sum())


def in_memory(label: str, config: dict[str, Any], state: Mapping[str, Tensor]) -> Adapter:
    """An adapter whose tensors are at hand."""
    return Adapter(
        label,
        config,
        {name: tuple(value.shape) for name, value in state.items()},
        {name: value.dtype for name, value in state.items()},
        lambda name: state[name].detach(),
    )


def _open_safetensors(label: str, config: dict[str, Any], path: Path) -> Adapter:
    header, read = open_safetensors(path)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise InputError(f"'{name}' of adapter '{label}' has type {entry['dtype']}, which cannot be merged")
    return Adapter(
        label,
        config,
        {name: tuple(entry["shape"]) for name, entry in header.items()},
        {name: DTYPES[entry["dtype"]] for name, entry in header.items()},
        read,
        path,
    )


def open_safetensors(path: Path) -> tuple[dict[str, Any], Callable[[str], Tensor]]:
    """The header's entries ("dtype", "shape", "data_offsets") by name, and a function that reads the tensor of a name.

    Raises InputError for a file that is damaged or not complete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # checks that the header is sound and the file complete
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"'{path}' is damaged or incomplete: {error}") from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)

    def read(name: str) -> Tensor:
        start, end = header[name]["data_offsets"]
        data = bytearray(end - start)
        with path.open("rb") as file:
            file.seek(8 + size + start)
            if file.readinto(data) != len(data):
                raise InputError(f"'{path}' is incomplete: it became shorter while it was read")
        dtype = DTYPES[header[name]["dtype"]]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(header[name]["shape"])

    return header, read


def check_config(adapter: Adapter) -> None:
    """Raises InputError for an adapter whose change to a weight is not s B A alone, naming the key that says so."""
    from peft import LoraConfig

    config = adapter.config
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"adapter '{adapter.label}' is of type {config.get('peft_type')}; only LoRA adapters can be merged"
        )
    known = LoraConfig().to_dict()
    for key, value in config.items():
        usual = known.get(key)
        if key not in UNDERSTOOD and value != usual and (value or usual):
            raise InputError(
                f"adapter '{adapter.label}' is not a plain low-rank pair: its {CONFIG} has {key}={value!r}. "
                "Merge it into its base model instead, or train it without"
            )
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise InputError(
            f"adapter '{adapter.label}' is not a plain low-rank pair: init_lora_weights={start!r} has changed the base model's "
            "weights. Save it with path_initial_model_for_weight_conversion, as PEFT describes for this start"
        )


@dataclass
class Part:
    """What one adapter has for one module."""

    adapter: int
    rank: int
    scale: float
    bias: bool


@dataclass
class Module:
    """An adapted layer over all adapters. Keys are the names of the tensors; the change is (m, n) once flattened."""

    name: str
    key_a: str
    key_b: str
    a_tail: tuple[int, ...]  # of A without the rank: (n,), or (channels, kernel..)
    b_head: int  # m
    b_tail: tuple[int, ...]  # ones of a convolution
    dtype: torch.dtype
    parts: list[Part] = field(default_factory=list)

    @property
    def n(self) -> int:
        return math.prod(self.a_tail)

    @property
    def columns(self) -> int:
        return sum(part.rank for part in self.parts)

    @property
    def key_bias(self) -> str:
        return self.key_b.removesuffix(".weight") + ".bias"

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for modules that can be merged in one batch."""
        return (self.b_head, self.n, self.dtype, tuple((part.adapter, part.rank) for part in self.parts))


def find_modules(adapters: list[Adapter]) -> tuple[list[Module], dict[str, list[int]]]:
    """The adapted layers of all adapters by name, and the other tensors (biases, saved modules) with the adapters that have them.

    Raises InputError where an adapter's tensors do not make pairs or the adapters' layers differ in shape.
    """
    modules: dict[str, Module] = {}
    extras: dict[str, list[int]] = {}
    for index, adapter in enumerate(adapters):
        for key in sorted(adapter.shapes):
            found = _pair(adapter, key)
            if found is not None:
                _add(modules, adapters, index, key, *found)
            elif ".lora_" not in key:
                extras.setdefault(key, []).append(index)
            elif not key.endswith((".lora_B.weight", ".lora_embedding_B", ".lora_B.bias")):
                raise InputError(f"adapter '{adapter.label}' is not a plain low-rank pair: it has a tensor '{key}'")
    if not modules:
        raise InputError(f"adapter '{adapters[0].label}' has no LoRA tensors")
    return [modules[name] for name in sorted(modules)], extras


def _pair(adapter: Adapter, key: str) -> tuple[str, str] | None:
    """(module, key of B) for the key of an A."""
    for ending, other in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
        if key.endswith(ending):
            stem = key.removesuffix(ending)
            if stem + other not in adapter.shapes:
                raise InputError(f"adapter '{adapter.label}' has '{key}' but no '{stem + other}'")
            return stem.removeprefix(PREFIX), stem + other
    return None


def _add(modules: dict[str, Module], adapters: list[Adapter], index: int, key_a: str, name: str, key_b: str) -> None:
    adapter = adapters[index]
    shape_a, shape_b = adapter.shapes[key_a], adapter.shapes[key_b]
    rank, scale = _rank_and_scale(adapter.config, name)
    if len(shape_a) < 2 or len(shape_b) < 2 or not shape_a[0] == shape_b[1] == rank or math.prod(shape_b[2:]) != 1:
        raise InputError(
            f"adapter '{adapter.label}': '{name}' has factors A {shape_a} and B {shape_b}, and {CONFIG} says rank {rank}: "
            "not a plain low-rank pair (a grouped convolution, a sharded file, or another adapter's configuration?)"
        )
    dtype = torch.promote_types(adapter.dtypes[key_a], adapter.dtypes[key_b])
    module = modules.setdefault(name, Module(name, key_a, key_b, shape_a[1:], shape_b[0], shape_b[2:], dtype))
    if (module.key_a, module.a_tail, module.b_head) != (key_a, shape_a[1:], shape_b[0]):
        first = adapters[module.parts[0].adapter].label
        raise InputError(
            f"'{name}' differs in shape: A (rank, {_sizes(module.a_tail)}) and B ({module.b_head}, rank) in '{first}', "
            f"A (rank, {_sizes(shape_a[1:])}) and B ({shape_b[0]}, rank) in '{adapter.label}'. They adapt different base models"
        )
    module.dtype = torch.promote_types(module.dtype, dtype)
    module.parts.append(Part(index, rank, scale, module.key_bias in adapter.shapes))


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = ranks.get(get_pattern_key(list(ranks), name), config.get("r", 8))
    alpha = alphas.get(get_pattern_key(list(alphas), name), config.get("lora_alpha", 8))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merged_config(adapters: list[Adapter], modules: list[Module], rank: int, saved: list[str] | None) -> dict[str, Any]:
    """adapter_config.json of the result: alpha equals the rank, so that the scale is 1 in every module."""
    from peft import LoraConfig

    known = {item.name for item in dataclasses.fields(LoraConfig)}
    first = adapters[0].config
    config = LoraConfig(**{key: value for key, value in first.items() if key in known and key != "peft_type"})
    config.r = config.lora_alpha = rank
    config.use_rslora = False
    config.rank_pattern, config.alpha_pattern = {}, {}
    config.lora_dropout = 0.0
    config.init_lora_weights = True
    config.inference_mode = True
    config.modules_to_save = saved
    config.lora_bias = any(part.bias for module in modules for part in module.parts)
    biases = {adapter.config.get("bias", "none") for adapter in adapters}
    config.bias = next(choice for choice in ("all", "lora_only", "none") if choice in biases)
    selection = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    chosen = [[_comparable(adapter.config.get(key)) for key in selection] for adapter in adapters]
    if any(other != chosen[0] for other in chosen[1:]):
        plain = all(isinstance(targets, list) and not any(rest) for targets, *rest in chosen)
        names = {module.name for module in modules}
        config.target_modules = sorted({target for targets, *_ in chosen for target in targets} if plain else names)
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    content: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=jsonable))
    return content


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | set | tuple) else value


def jsonable(value: Any) -> Any:
    """What json.dumps takes in place of the sets and enumerations of a PEFT configuration."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))


class StreamedFile:
    """A safetensors file whose tensors' shapes are known beforehand: the header is written first, the data in any order."""

    def __init__(self, path: Path, layout: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in layout:
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.header, self.begin = path, header, 8 + len(text)
        self.file = path.open("r+b" if path.exists() else "w+b")
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.truncate(self.begin + end)

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor, converted to the type that the header says, in its place."""
        entry = self.header[name]
        flat = value.detach().to("cpu", DTYPES[entry["dtype"]]).contiguous().flatten().view(torch.uint8)
        assert tuple(value.shape) == tuple(entry["shape"]), name
        self.file.seek(self.begin + entry["data_offsets"][0])
        self.file.write(flat.numpy().data)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with (
            contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext()
        ):  # a full disk has been told of
            self.file.close()
