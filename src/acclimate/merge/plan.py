"""What a merge will do, decided from the adapters' headers: the layers, their batches, and what becomes of other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acclimate.errors import InputError, MissingError
from acclimate.merge.adapter_files import Adapter, Module, check_config, find_modules, open_adapter
from acclimate.merge.circumerge import MergeSettings, merge_seconds

BATCH_BYTES = 2**24  # of the factors merged at once; a layer that is larger is merged alone
POLICIES = ("mean", "first", "error", "drop")
BYTES_PER_SECOND = 1e9  # of reading and converting, for predictions


@dataclass
class MergePlan:
    """What a merge will do; nothing but the headers has been read."""

    adapters: list[Adapter]
    modules: list[Module]
    extras: dict[str, list[int]]
    weights: list[float]
    settings: MergeSettings
    dtype: torch.dtype
    device: torch.device
    jobs: int
    modules_to_save: str

    @property
    def rank(self) -> int | None:
        """Of the result; None where the data decide."""
        if isinstance(self.settings.rank, str):
            return None
        return self.settings.rank or max(part.rank for module in self.modules for part in module.parts)

    def batches(self) -> list[list[Module]]:
        """Layers of one shape and the same ranks, as many as fit into BATCH_BYTES; the same in every run."""
        groups: dict[tuple[Any, ...], list[Module]] = {}
        for module in self.modules:
            groups.setdefault(module.signature, []).append(module)
        batches = []
        for group in groups.values():
            size = max(1, BATCH_BYTES // _bytes(group[0]))
            batches += [group[start : start + size] for start in range(0, len(group), size)]
        return batches

    def to_dict(self) -> dict[str, Any]:
        """For people and scripts: layers, shapes, ranks, predicted memory (bytes) and time (seconds on one core)."""
        seconds = sum(merge_seconds(self.settings, m.columns, m.b_head, m.n) for m in self.modules)
        read = sum(value.itemsize * _numel(a.shapes[key]) for a in self.adapters for key, value in a.dtypes.items())
        return {
            "adapters": [adapter.label for adapter in self.adapters],
            "modules": [
                {"name": m.name, "shape": [m.b_head, m.n], "ranks": [part.rank for part in m.parts]}
                for m in self.modules
            ],
            "other_tensors": sorted(self.extras),
            "rank": self.settings.rank if self.rank is None else self.rank,
            "dtype": str(self.dtype).removeprefix("torch."),
            "predicted_bytes": self.jobs * 3 * max(sum(map(_bytes, batch)) for batch in self.batches()),
            "predicted_seconds": seconds * (1 if self.rank else 2) + read / BYTES_PER_SECOND,
        }

    def is_bias(self, key: str) -> bool:
        """Whether a tensor is a bias of the base model, trained by LoRA's `bias` option, and not part of a saved module."""
        saved = {name for adapter in self.adapters for name in adapter.config.get("modules_to_save") or []}
        return key.endswith(".bias") and not any(f".{name}." in f".{key}" for name in saved)

    def kept_extras(self) -> dict[str, list[int]]:
        """Key -> adapters whose tensors are averaged."""
        kept = {}
        for key, holders in sorted(self.extras.items()):
            if self.is_bias(key) or self.modules_to_save == "mean":
                kept[key] = holders
            elif self.modules_to_save != "drop":
                kept[key] = holders[:1]
        return kept

    @property
    def saved_modules(self) -> list[str] | None:
        if self.modules_to_save == "drop":
            return None
        return sorted({name for a in self.adapters for name in a.config.get("modules_to_save") or []}) or None

    def layout(self, rank: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Names, types and shapes of the result's tensors."""
        layout: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        for module in self.modules:
            layout.append((module.key_a, self.dtype, (rank, *module.a_tail)))
            layout.append((module.key_b, self.dtype, (module.b_head, rank, *module.b_tail)))
            if any(part.bias for part in module.parts):
                layout.append((module.key_bias, self.dtype, (module.b_head,)))
        for key, holders in self.kept_extras().items():
            dtype = self.adapters[holders[0]].dtypes[key]
            for index in holders[1:]:
                dtype = torch.promote_types(dtype, self.adapters[index].dtypes[key])
            layout.append((key, dtype, self.adapters[holders[0]].shapes[key]))
        return layout


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _bytes(module: Module) -> int:
    """Of a layer's factors over all adapters, and of the small matrices."""
    size = 8 if module.dtype == torch.float64 else 4
    return module.columns * (module.b_head + module.n) * size + 16 * module.columns**2


def plan_merge(
    paths: Sequence[str | Path | Adapter],
    *,
    weights: Sequence[float] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    jobs: int = 1,
    modules_to_save: str = "mean",
    allow_different_base: bool = False,
    **settings: Any,
) -> MergePlan:
    """Open the adapters that are not open yet, check that they fit together, and say what a merge would do. Arguments as for
    `merge_adapters`."""
    chosen = MergeSettings(**settings)
    if not paths:
        raise ValueError("merging needs at least one adapter")
    adapters = [path if isinstance(path, Adapter) else open_adapter(path) for path in paths]
    weights = [1.0] * len(adapters) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(adapters):
        raise ValueError(f"there are {len(adapters)} adapters and {len(weights)} weights")
    if not torch.tensor(weights).isfinite().all():
        raise ValueError(f"weights must be finite numbers, not {weights}")
    if modules_to_save not in POLICIES:
        raise ValueError(f"modules_to_save is {', '.join(POLICIES)}; not '{modules_to_save}'")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    for adapter in adapters:
        check_config(adapter)
    bases = {adapter.config.get("base_model_name_or_path") for adapter in adapters} - {None}
    if len(bases) > 1 and not allow_different_base:
        named = ", ".join(f"'{a.label}' of '{a.config.get('base_model_name_or_path')}'" for a in adapters)
        raise InputError(
            f"the adapters belong to different base models: {named}. If these are the same model, say --allow-different-base"
        )
    place = named_device(device)
    modules, extras = find_modules(adapters)
    if chosen.rule == "mean" and sum(weights) == 0:
        raise ValueError("the weights add up to 0: they have no mean")
    widest = modules[0].dtype
    for module in modules:
        widest = torch.promote_types(widest, module.dtype)
    plan = MergePlan(
        adapters, modules, extras, weights, chosen, named_dtype(dtype) or widest, place, jobs, modules_to_save
    )
    _check_extras(plan)
    return plan


def named_device(name: str) -> torch.device:
    """Raises ValueError for what is no device and MissingError for one that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is cpu or cuda, not '{name}'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MissingError("device 'cuda' is not here. Available: cpu")
    return device


def named_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A floating type by its name; None stays None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    known = ("float64", "float32", "float16", "bfloat16")
    if name not in known:
        raise ValueError(f"dtype is {', '.join(known)}; not '{name}'")
    value: torch.dtype = getattr(torch, name)
    return value


def _check_extras(plan: MergePlan) -> None:
    averaged = any(part.bias for module in plan.modules for part in module.parts) and plan.settings.rule != "sum"
    for key, holders in plan.extras.items():
        policy = "mean" if plan.is_bias(key) else plan.modules_to_save
        labels = ", ".join(f"'{plan.adapters[index].label}'" for index in holders)
        if policy == "error" and len(holders) > 1:
            raise InputError(f"'{key}' is in more than one adapter: {labels}. Say what to do with --modules-to-save")
        shapes = {plan.adapters[index].shapes[key] for index in holders}
        if policy == "mean":
            averaged = True
            if len(shapes) > 1:
                raise InputError(
                    f"'{key}' has different shapes in {labels}: {sorted(shapes)}; it has no mean. Use --modules-to-save first or drop"
                )
            if sum(plan.weights[index] for index in holders) == 0:
                raise ValueError(f"the weights of the adapters that have '{key}' add up to 0: they have no mean")
    if averaged and sum(plan.weights) == 0:
        raise ValueError("the weights add up to 0: the biases have no mean")
