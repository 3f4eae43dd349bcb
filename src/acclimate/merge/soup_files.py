"""MonoSoup from files to files: a checkpoint or a LoRA adapter, one tensor at a time, taken up again after a kill.

While it is made, the result lies in a hidden directory beside its place, with a journal of the tensors that are on disk. The same
command with the same inputs goes on from there. It is renamed to its place when all of it is there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import acclimate
from acclimate.errors import InputError
from acclimate.merge.adapter_files import (
    CONFIG,
    WEIGHTS,
    Adapter,
    Module,
    check_config,
    find_modules,
    merged_config,
    open_adapter,
)
from acclimate.merge.adapters import in_order
from acclimate.merge.checkpoints import REPORT, Layout, ShardedWriter, copy_other_files, write_index
from acclimate.merge.monosoup import (
    SoupPlan,
    SoupReport,
    SoupSettings,
    make_report,
    plan_soup,
    report_of,
    soup_lora,
)
from acclimate.merge.plan import named_device, named_dtype
from acclimate.runs import storage_errors, write_json
from acclimate.show import Silent
from acclimate.unfinished import Unfinished, check_place

Tensors = list[tuple[str, Tensor]]
Work = Callable[[Any], tuple[Tensors, dict[str, Any]]]


def monosoup_checkpoint(
    base: str | Path,
    tuned: str | Path,
    out: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    show: Silent | None = None,
    **settings: Any,
) -> SoupReport:
    """Edit the checkpoint `tuned` of a model that was tuned from `base`, and write it to the directory `out` with the same shards.

    `dtype` of the result: default as in `tuned`. `jobs`: tensors at once. `settings` are the fields of `SoupSettings`. A run that was
    killed goes on where it was when it is called again with the same arguments.

    Raises ValueError for arguments out of range, InputError for checkpoints that do not fit together, MissingError for a full disk.
    """
    start, chosen, target, where = time.perf_counter(), SoupSettings(**settings), named_dtype(dtype), Path(out)
    named_device(chosen.device)
    check_place(where, [Path(base), Path(tuned)], overwrite)
    plan = plan_soup(base, tuned, chosen)
    layouts = checkpoint_layouts(plan, target)
    dtypes = {name: kind for layout in layouts.values() for name, kind, _ in layout}

    def work(item: Any) -> tuple[Tensors, dict[str, Any]]:
        value, row = plan.soup(item)
        converted = value.to(dtypes[item[0][0]])
        if value.is_floating_point() and not converted.isfinite().all() and value.isfinite().all():
            raise ValueError(f"'{item[0][0]}' does not fit into {converted.dtype}: its values are too large")
        return [(name, converted) for name in item[0]], row

    made_with = {
        "acclimate": acclimate.__version__,
        "settings": asdict(chosen),
        "dtype": str(dtype),
        "base": plan.base.identity(),
        "tuned": plan.tuned.identity(),
    }

    def complete(rows: list[dict[str, Any]], directory: Path) -> SoupReport:
        if len(layouts) > 1:
            write_index(directory, layouts)
        if not Path(tuned).is_file():  # what lies beside a file that was named need not belong to it
            copy_other_files(plan.tuned.files[0].parent, directory)
        return report_of(plan, rows, time.perf_counter() - start)

    return _stream(where, made_with, layouts, plan.items, work, complete, jobs, show or Silent())


def checkpoint_layouts(plan: SoupPlan, dtype: torch.dtype | None) -> dict[str, Layout]:
    """Names, types and shapes of the result's tensors by file."""
    tuned = plan.tuned

    def kind(name: str) -> torch.dtype:
        return dtype if dtype is not None and tuned.dtypes[name].is_floating_point else tuned.dtypes[name]

    return {file: [(name, kind(name), tuned.shapes[name]) for name in names] for file, names in tuned.shards.items()}


def monosoup_adapter(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    show: Silent | None = None,
    **settings: Any,
) -> SoupReport:
    """Edit the LoRA adapter at `path` (a PEFT directory, or a run of acclimate) without its base, and write one with scale 1 to `out`.

    Arguments as for `monosoup_checkpoint`. Raises InputError for adapters that are more than a low-rank pair.
    """
    start, chosen, target, where = time.perf_counter(), SoupSettings(**settings), named_dtype(dtype), Path(out)
    named_device(chosen.device)
    check_place(where, [Path(path)], overwrite)
    adapter, modules, extras = open_lora(path, chosen)
    layout: Layout = []
    for module in modules:
        for key in _keys(adapter, module):
            layout.append((key, target or adapter.dtypes[key], adapter.shapes[key]))
    layout += [(key, adapter.dtypes[key], adapter.shapes[key]) for key in extras]
    dtypes = {name: kind for name, kind, _ in layout}

    def work(item: Module | str) -> tuple[Tensors, dict[str, Any]]:
        if isinstance(item, str):
            return [(item, adapter.finite(item))], {"name": item, "skipped": "not a low-rank pair"}
        tensors, row = _soup_module(adapter, item, chosen)
        for name, value in tensors:
            if not value.to(dtypes[name]).isfinite().all():
                raise ValueError(f"'{name}' does not fit into {dtypes[name]}: its values are too large")
        return tensors, row

    made_with = {
        "acclimate": acclimate.__version__,
        "settings": asdict(chosen),
        "dtype": str(dtype),
        "adapter": adapter.label,
        "sha256": adapter.sha256(),
    }

    def complete(rows: list[dict[str, Any]], directory: Path) -> SoupReport:
        write_json(directory / CONFIG, soup_config(adapter, modules))
        assert adapter.path is not None
        copy_other_files(adapter.path.parent, directory)
        return make_report(rows, chosen, [], time.perf_counter() - start, half=False)

    return _stream(where, made_with, {WEIGHTS: layout}, [*modules, *extras], work, complete, jobs, show or Silent())


def open_lora(path: str | Path, settings: SoupSettings) -> tuple[Adapter, list[Module], list[str]]:
    """The adapter, its low-rank pairs, and the names of its other tensors."""
    adapter = open_adapter(path)
    check_config(adapter)
    modules, extras = find_modules([adapter])
    if not any(settings.wants(module.name) for module in modules):
        raise InputError(f"--include and --exclude leave none of the {len(modules)} layers of '{adapter.label}'")
    return adapter, modules, sorted(extras)


def soup_config(adapter: Adapter, modules: Sequence[Module]) -> dict[str, Any]:
    """adapter_config.json of the result: alpha equals the rank in every layer, so that the scale is 1."""
    ranks = dict(adapter.config.get("rank_pattern") or {})
    config = merged_config([adapter], list(modules), adapter.config.get("r", 8), adapter.config.get("modules_to_save"))
    return {**config, "rank_pattern": ranks, "alpha_pattern": dict(ranks)}


def _keys(adapter: Adapter, module: Module) -> list[str]:
    return [key for key in (module.key_a, module.key_b, module.key_bias) if key in adapter.shapes]


def _soup_module(adapter: Adapter, module: Module, settings: SoupSettings) -> tuple[Tensors, dict[str, Any]]:
    start, part = time.perf_counter(), module.parts[0]
    a, b = adapter.finite(module.key_a), adapter.finite(module.key_b)
    row: dict[str, Any] = {"name": module.name, "shape": [module.b_head, module.n], "rank": part.rank}
    edit = None
    if settings.wants(module.name):
        place = settings.device
        new_a, new_b, edit = soup_lora(a.flatten(1).to(place), b.flatten(1).to(place), part.scale, settings)
        row["skipped"] = "unchanged"
    else:
        new_a, new_b = a.flatten(1), part.scale * b.flatten(1).double()
        row["skipped"] = "left out by name"
    if edit is not None:
        del row["skipped"]
        row |= {**asdict(edit), "seconds": time.perf_counter() - start}
    tensors = [(module.key_a, new_a.reshape(a.shape)), (module.key_b, new_b.reshape(b.shape))]
    if part.bias:
        tensors.append((module.key_bias, part.scale * adapter.finite(module.key_bias).double()))
    return tensors, row


def _stream(
    out: Path,
    made_with: dict[str, Any],
    layouts: Mapping[str, Layout],
    items: Sequence[Any],
    work: Work,
    complete: Callable[[list[dict[str, Any]], Path], SoupReport],
    jobs: int,
    show: Silent,
) -> SoupReport:
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    with storage_errors(out), Unfinished(out, made_with) as unfinished:
        if unfinished.done:
            show.say(f"going on with an interrupted soup: {len(unfinished.done)} of {len(items)} tensors are done")
        with ShardedWriter(unfinished.path, layouts) as writer:
            show.start("souping", len(items), len(unfinished.done))
            for index, (tensors, row) in in_order(work, list(items), set(unfinished.done), jobs):
                for name, value in tensors:
                    writer.write(name, value)
                unfinished.record(index, [row], writer)
                show.advance(1)
            show.stop()
        rows = [row for index in sorted(unfinished.done) for row in unfinished.done[index]]
        report = replace(complete(rows, unfinished.path), directory=str(out))
        write_json(unfinished.path / REPORT, {**asdict(report), "made_with": made_with})
        unfinished.finish(out)
    for text in report.warnings:
        warnings.warn(text, stacklevel=3)
    return report
