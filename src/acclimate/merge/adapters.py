"""Merge adapter directories into one adapter directory, a batch of layers at a time, and go on after a kill.

While it is made, the result lies in a hidden directory beside its place, with a journal of the layers that are on disk. The same
command with the same inputs goes on from there. It is renamed to its place when all of it is there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InputError
from acclimate.merge.adapter_files import CONFIG, WEIGHTS, Module, StreamedFile, merged_config
from acclimate.merge.circumerge import Basis, Core, RankDeficient, merge_core
from acclimate.merge.plan import MergePlan, plan_merge
from acclimate.merge.report import MergeReport, fingerprint, made_with, make_report, module_row, rank_for, readme
from acclimate.runs import storage_errors, write_json, write_text
from acclimate.show import Silent
from acclimate.unfinished import Unfinished, check_place

Sink = Callable[[str, Tensor], None]


def merge_adapters(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    weights: Sequence[float] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    jobs: int = 1,
    modules_to_save: str = "mean",
    allow_different_base: bool = False,
    overwrite: bool = False,
    show: Silent | None = None,
    **settings: Any,
) -> Any:
    """Merge LoRA adapters of one base model into one LoRA adapter, without the base model.

    `paths`: PEFT adapter directories (or run directories of acclimate, or hub ids in the local cache). `out`: the directory to write;
    returns a `MergeReport`. With `out=None` returns (config_dict, state_dict). `weights`: one number an adapter, default 1. `dtype` of
    the result: default the widest of the inputs. `jobs`: batches of layers at once. `modules_to_save`: what to do with trained heads
    and other whole tensors: mean, first, error or drop. `settings` are the fields of `MergeSettings`: rule, rank, scale, density, drop,
    sign, sketch, refine, space, basis, seed.

    A run that was killed goes on where it was when it is called again with the same arguments.

    Raises ValueError for arguments out of range, InputError for adapters that cannot be merged, MissingError for a full disk.
    """
    show = show or Silent()
    plan = plan_merge(
        paths,
        weights=weights,
        dtype=dtype,
        device=device,
        jobs=jobs,
        modules_to_save=modules_to_save,
        allow_different_base=allow_different_base,
        **settings,
    )
    if out is None:
        config, state, report = merge_in_memory(plan, show)
    else:
        report = _merge_to(plan, Path(out), overwrite, show)
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    return report if out is not None else (config, state)


def merge_in_memory(
    plan: MergePlan, show: Silent | None = None
) -> tuple[dict[str, Any], dict[str, Tensor], MergeReport]:
    """Carry a plan out: (config, tensors, report)."""
    show, start = show or Silent(), time.perf_counter()
    rank = plan.rank or _needed_rank(plan, show)
    dtypes = {name: dtype for name, dtype, _ in plan.layout(rank)}
    state: dict[str, Tensor] = {}

    def sink(name: str, value: Tensor) -> None:
        state[name] = value.detach().to("cpu", dtypes[name]).contiguous()

    rows = [row for _, rows in _merge_batches(plan, rank, sink, set(), show) for row in rows]
    _merge_extras(plan, sink)
    report = make_report(plan, rank, rows, time.perf_counter() - start)
    return (
        merged_config(plan.adapters, plan.modules, rank, plan.saved_modules),
        {name: state[name] for name in dtypes},
        report,
    )


def _merge_to(plan: MergePlan, out: Path, overwrite: bool, show: Silent) -> MergeReport:
    start = time.perf_counter()
    check_place(out, [a.path.parent for a in plan.adapters if a.path is not None], overwrite)
    with storage_errors(out):
        hashes = [adapter.sha256() for adapter in plan.adapters]
        with Unfinished(out, fingerprint(plan, hashes)) as unfinished:
            rank = plan.rank or unfinished.rank
            if rank is None:
                rank = _needed_rank(plan, show)
                unfinished.record_rank(rank)
            if unfinished.done:
                show.say(
                    f"going on with an interrupted merge: {len(unfinished.done)} of {len(plan.batches())} batches are done"
                )
            with StreamedFile(unfinished.path / WEIGHTS, plan.layout(rank)) as file:
                for index, rows in _merge_batches(plan, rank, file.write, set(unfinished.done), show):
                    unfinished.record(index, rows, file)
                _merge_extras(plan, file.write)
            rows = [row for index in sorted(unfinished.done) for row in unfinished.done[index]]
            report = make_report(plan, rank, rows, time.perf_counter() - start)
            report.directory = str(out)
            write_json(unfinished.path / CONFIG, merged_config(plan.adapters, plan.modules, rank, plan.saved_modules))
            write_json(unfinished.path / "merge_report.json", {**asdict(report), "made_with": made_with(plan, hashes)})
            write_text(unfinished.path / "README.md", readme(plan, rank, hashes))
            unfinished.finish(out)
    return report


# --- the layers ---


def _merge_batches(
    plan: MergePlan, rank: int, sink: Sink, done: set[int], show: Silent
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Merge the batches that are not done, hand the tensors to `sink`, and yield (batch number, a row a layer)."""
    batches = plan.batches()
    show.start("merging", sum(map(len, batches)), sum(len(batches[index]) for index in done))

    def work(batch: list[Module]) -> tuple[list[tuple[str, Tensor]], list[dict[str, Any]]]:
        start = time.perf_counter()
        tensors: list[tuple[str, Tensor]] = []
        rows = []
        for modules, core in merge_modules(plan, batch):
            a, b = core.factors(rank)
            for index, module in enumerate(modules):
                tensors.append((module.key_a, a[index].unflatten(-1, module.a_tail).to(plan.dtype)))
                tensors.append((module.key_b, b[index].reshape(module.b_head, rank, *module.b_tail).to(plan.dtype)))
                rows.append(module_row(module, core, index, rank))
                if any(part.bias for part in module.parts):
                    tensors.append((module.key_bias, _bias(plan, module)))
        for row in rows:
            row["seconds"] = (time.perf_counter() - start) / len(batch)
        return tensors, rows

    for index, (tensors, rows) in in_order(work, batches, done, plan.jobs):
        for name, value in tensors:
            if not value.isfinite().all():
                raise ValueError(
                    f"'{name}' does not fit into {plan.dtype}: its values are too large. Use a wider --dtype"
                )
            sink(name, value)
        show.advance(len(rows))
        yield index, rows
    show.stop()


def in_order(work: Callable[[Any], Any], batches: list[Any], done: set[int], jobs: int) -> Iterator[tuple[int, Any]]:
    """(number, result) of the batches not done; with several jobs, no more than these are held in memory."""
    todo = [index for index in range(len(batches)) if index not in done]
    if jobs == 1:
        for index in todo:
            yield index, work(batches[index])
        return
    with ThreadPoolExecutor(jobs) as pool:
        running: list[tuple[int, Future[Any]]] = []
        for index in todo:
            running.append((index, pool.submit(work, batches[index])))
            if len(running) == jobs:
                first, future = running.pop(0)
                yield first, future.result()
        for index, future in running:
            yield index, future.result()


def merge_modules(plan: MergePlan, batch: list[Module]) -> Iterator[tuple[list[Module], Core]]:
    """Read and merge layers of one signature: all at once, or one by one where a layer's columns are dependent."""
    b_rows, a_rows = read_rows(plan, batch)
    try:
        yield batch, merge_rows(plan, batch, b_rows, a_rows)
    except RankDeficient:
        for index, module in enumerate(batch):
            part = slice(index, index + 1)
            yield [module], merge_rows(plan, [module], b_rows[part], a_rows[part])


def read_rows(plan: MergePlan, batch: list[Module]) -> tuple[Tensor, Tensor]:
    """B^T (L, R, m) and A (L, R, n) of a batch, in float32 (float64 where an input has it)."""
    first = batch[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    b_rows = torch.empty(len(batch), first.columns, first.b_head, dtype=dtype)
    a_rows = torch.empty(len(batch), first.columns, first.n, dtype=dtype)
    for index, module in enumerate(batch):
        start = 0
        for part in module.parts:
            adapter, rows = plan.adapters[part.adapter], slice(start, start + part.rank)
            a_rows[index, rows] = adapter.finite(module.key_a).flatten(1)
            b_rows[index, rows] = adapter.finite(module.key_b).flatten(1).T
            start += part.rank
    return b_rows.to(plan.device), a_rows.to(plan.device)


def merge_rows(plan: MergePlan, batch: list[Module], b_rows: Tensor, a_rows: Tensor) -> Core:
    """`merge_core` with the ranks, scales and weights of a batch."""
    parts = [module.parts for module in batch]
    scales = [
        torch.tensor([of[task].scale for of in parts], dtype=torch.float64, device=plan.device)
        for task in range(len(parts[0]))
    ]
    return merge_core(
        b_rows,
        a_rows,
        [part.rank for part in parts[0]],
        scales,
        [plan.weights[part.adapter] for part in parts[0]],
        plan.settings,
        [module.name for module in batch],
        sum(plan.weights),
    )


def _needed_rank(plan: MergePlan, show: Silent) -> int:
    """The smallest common rank that keeps the share of the squared norm, over all layers, that was asked for."""
    share = plan.settings.kept_share
    assert share is not None
    batches = plan.batches()
    show.start("finding the rank", sum(map(len, batches)))
    spectra: list[Tensor] = []

    def work(batch: list[Module]) -> list[Tensor]:
        return [spectrum for _, core in merge_modules(plan, batch) for spectrum in core.sigma.cpu()]

    for _, found in in_order(work, batches, set(), plan.jobs):
        spectra += found
        show.advance(len(found))
    show.stop()
    return rank_for(spectra, share)


# --- tensors that are not low-rank pairs ---


def _bias(plan: MergePlan, module: Module) -> Tensor:
    """The bias beside B of a module: added up as the changes are by rule="sum", else the weighted mean; its scale folded in."""
    total = torch.zeros(module.b_head, dtype=torch.float64)
    for part in module.parts:
        if part.bias:
            total += (
                plan.weights[part.adapter] * part.scale * plan.adapters[part.adapter].finite(module.key_bias).double()
            )
    divisor = 1.0 if plan.settings.rule == "sum" else sum(plan.weights)
    return (plan.settings.scale * total / divisor).to(plan.dtype)


def _merge_extras(plan: MergePlan, sink: Sink) -> None:
    for key, holders in plan.kept_extras().items():
        first = plan.adapters[holders[0]].finite(key)
        if len(holders) == 1:
            sink(key, first)
            continue
        if not first.is_floating_point():
            if any(not torch.equal(first, plan.adapters[index].read(key)) for index in holders[1:]):
                raise InputError(
                    f"'{key}' holds different integers, which have no mean. Use --modules-to-save first or drop"
                )
            sink(key, first)
            continue
        total = sum(plan.weights[index] for index in holders)
        mean = first.to(torch.promote_types(first.dtype, torch.float32)) * (plan.weights[holders[0]] / total)
        for index in holders[1:]:
            mean = mean + plan.adapters[index].finite(key) * (plan.weights[index] / total)
        sink(key, mean)


# --- which basis ---


def compare_bases(plan: MergePlan, show: Silent | None = None) -> list[dict[str, Any]]:
    """Merge with all three bases and write nothing: a row a basis with its seconds (without reading) and the distance of its result.

    The distance is ||Delta - Delta_svd||_F / ||Delta_svd||_F over all layers.
    """
    show = show or Silent()
    rank = plan.rank or _needed_rank(plan, show)
    bases: tuple[Basis, ...] = ("svd", "gram", "circulant")
    seconds, errors, norm = dict.fromkeys(bases, 0.0), dict.fromkeys(bases, 0.0), 0.0
    show.start("comparing", len(plan.modules))
    for batch in plan.batches():
        rows = read_rows(plan, batch)
        results = {}
        for basis in bases:
            forced = replace(plan, settings=replace(plan.settings, basis=basis))
            start = time.perf_counter()
            results[basis] = _factors(forced, batch, *rows, rank)
            seconds[basis] += time.perf_counter() - start
        a, b = results["svd"]
        norm += _squared_norm(b, a)
        for basis, (other_a, other_b) in results.items():
            errors[basis] += _squared_norm(torch.cat([other_b, -b], -1), torch.cat([other_a, a], -2))
        show.advance(len(batch))
    show.stop()
    return [
        {"basis": basis, "seconds": seconds[basis], "distance": (errors[basis] / norm) ** 0.5 if norm else 0.0}
        for basis in bases
    ]


def _factors(plan: MergePlan, batch: list[Module], b_rows: Tensor, a_rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    try:
        return merge_rows(plan, batch, b_rows, a_rows).factors(rank)
    except RankDeficient:
        each = [
            merge_rows(plan, [module], b_rows[i : i + 1], a_rows[i : i + 1]).factors(rank)
            for i, module in enumerate(batch)
        ]
        return torch.cat([a for a, _ in each]), torch.cat([b for _, b in each])


def _squared_norm(b: Tensor, a: Tensor) -> float:
    """||b a||_F^2 of a batch (L, m, k), (L, k, n), from triangular factors, so that a small difference is not lost."""
    return float((torch.linalg.qr(b).R @ torch.linalg.qr(a.mT).R.mT).square().sum())
