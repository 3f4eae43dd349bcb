"""MonoSoup: give one fine-tuned checkpoint back some of its base model's breadth, with no data and nothing to tune.

Fine-tuning often costs accuracy on everything that the training data did not show. Averaging many fine-tunes helps, but there is
usually one. MonoSoup splits what fine-tuning changed in each matrix, Delta = W1 - W0 = U diag(sigma) V^T, into its strong directions
and the rest, and weighs the two by the spectrum:

    p_i = sigma_i / sum sigma,   e = exp(-sum p_i ln p_i),   k = ceil(e)              (effective rank)
    P = sum_{i<=k} sigma_i^2 / sum sigma_i^2,   rho = (sigma_{k+1} / sigma_1)^2,   c = sqrt(1 - P)
    lambda_low = rho + (1 - rho) c,   lambda_high = 1 - lambda_low
    W = W0 + lambda_high Delta_high + lambda_low Delta_low

Source: "Model soups need only one ingredient", arXiv 2602.09689 (ICML 2026). Vectors, biases and norms stay as fine-tuned.

At scale: one tensor is in memory at a time, in float64, about four copies of it. Large matrices go through the Gram matrix of their
smaller side (one product, eigh, one product), which takes about half the time of an SVD in float64. For LoRA the factors are enough.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from acclimate.errors import InputError, did_you_mean
from acclimate.linalg import effective_rank, gram_triangle
from acclimate.merge.checkpoints import Checkpoint, as_checkpoint, counterparts, in_memory

Mode = Literal["effective-rank", "variance"]
Solver = Literal["auto", "svd", "gram"]
Source = str | Path | Mapping[str, Tensor]

NOISE = 1e-7  # singular values below this share of the largest are rounding
UNCHANGED = 1e-6  # ||Delta|| / ||W0|| below which a tensor is left as it is
WEAK = 2.0**-7  # ||Delta|| / ||W0|| below which the rounding of bfloat16 weights is a large part of Delta
GRAM_FROM = 2**18  # entries: from here on the Gram matrix is faster than the SVD


@dataclass(frozen=True)
class SoupSettings:
    """How the edit is made. `mode="variance"` keeps the directions with `energy` of the squared norm instead of ceil(e) of them.

    `include` and `exclude` are regular expressions that names are searched for; `strict` refuses tensors that the base lacks.
    """

    mode: Mode = "effective-rank"
    energy: float = 0.8
    solver: Solver = "auto"
    include: str | None = None
    exclude: str | None = None
    strict: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (("mode", get_args(Mode)), ("solver", get_args(Solver))):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {', '.join(known)}; not '{value}'.{did_you_mean(str(value), known)}")
        if not 0 < self.energy <= 1:
            raise ValueError(f"energy must be above 0 and at most 1, not {self.energy}")
        for name in ("include", "exclude"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"{name} is not a regular expression: {error}") from None

    def wants(self, name: str) -> bool:
        return (self.include is None or re.search(self.include, name) is not None) and (
            self.exclude is None or re.search(self.exclude, name) is None
        )


@dataclass(frozen=True)
class Edit:
    """What the spectrum of a change says: q singular values that are not noise, k strong ones, and the weights of the two parts."""

    q: int
    effective_rank: float
    k: int
    energy: float
    rho: float
    lambda_low: float
    lambda_high: float


def weights_of(sigma: Tensor, mode: Mode = "effective-rank", energy: float = 0.8) -> Edit:
    """The edit for singular values (n,), largest first, of which the first is not zero."""
    sigma = sigma.double() / sigma[0].double()
    sigma = torch.where(sigma > NOISE, sigma, 0.0)
    squares, q, e = sigma.square(), int((sigma > 0).sum()), float(effective_rank(sigma))
    if mode == "variance":
        # the last sum is 1 up to rounding
        k = int((squares.cumsum(0) / squares.sum() < energy * (1 - 1e-12)).sum()) + 1
    else:
        k = math.ceil(e - 1e-6)  # an exact rank is not to become one more by rounding
    k = max(1, min(q, k))
    tail = float(squares[k:].sum() / squares.sum())
    rho = float(squares[k]) if k < q else 0.0
    low = min(1.0, max(0.0, rho + (1 - rho) * math.sqrt(tail)))
    return Edit(q, e, k, 1 - tail, rho, low, 1 - low)


def soup_delta(delta: Tensor, settings: SoupSettings | None = None) -> tuple[Tensor, Edit]:
    """lambda_high Delta_high + lambda_low Delta_low (m, n) for a change (m, n) that is not zero; computed in float64."""
    settings, delta = settings or SoupSettings(), delta.double()
    if settings.solver == "gram" or (settings.solver == "auto" and delta.numel() >= GRAM_FROM):
        return _by_gram(delta, settings)
    left, sigma, right = torch.linalg.svd(delta, full_matrices=False)
    edit = weights_of(sigma, settings.mode, settings.energy)
    high = (left[:, : edit.k] * sigma[: edit.k]) @ right[: edit.k]
    return high.mul_(edit.lambda_high - edit.lambda_low).add_(delta, alpha=edit.lambda_low), edit


def _by_gram(delta: Tensor, settings: SoupSettings) -> tuple[Tensor, Edit]:
    wide = delta.shape[0] < delta.shape[1]
    values, vectors = torch.linalg.eigh(gram_triangle(delta.T if wide else delta))  # the largest is the last
    rounding = 4 * math.sqrt(max(delta.shape)) * torch.finfo(torch.float64).eps  # of the sums in the Gram matrix
    sigma = torch.where(values > rounding * values[-1], values, 0.0).sqrt().flip(0)
    edit = weights_of(sigma, settings.mode, settings.energy)
    top = vectors[:, -edit.k :]
    mix = (top @ top.T).mul_(edit.lambda_high - edit.lambda_low)  # both parts in one product
    mix.diagonal().add_(edit.lambda_low)
    return (mix @ delta if wide else delta @ mix), edit


def soup_tensor(base: Tensor, tuned: Tensor, settings: SoupSettings | None = None) -> tuple[Tensor, dict[str, Any]]:
    """One tensor (m, ...) of two or more dimensions, seen as (m, rest): the edited one in the type of `tuned`, and its row in the report."""
    settings = settings or SoupSettings()
    try:
        return _soup_tensor(base, tuned, settings, settings.device)
    except torch.OutOfMemoryError:
        if settings.device == "cpu":
            raise
        value, row = _soup_tensor(base, tuned, settings, "cpu")
        return value, {**row, "note": f"out of memory on {settings.device}; done on the CPU"}


def _soup_tensor(base: Tensor, tuned: Tensor, settings: SoupSettings, device: str) -> tuple[Tensor, dict[str, Any]]:
    start = time.perf_counter()
    origin = base.flatten(1).to(device, torch.float64)
    delta = tuned.flatten(1).to(device, torch.float64) - origin
    size, change = float(origin.norm()), float(delta.norm())
    if change == 0 or change < UNCHANGED * size:
        return tuned, {"skipped": "unchanged"}
    new, edit = soup_delta(delta, settings)
    del delta
    # with nothing beyond the k directions the edit is none, and the tuned bits are kept
    value = tuned if edit.k == edit.q else new.add_(origin).reshape(tuned.shape).to(tuned.device, tuned.dtype)
    return value, {
        **asdict(edit),
        "relative_norm": change / size if size else None,
        "seconds": time.perf_counter() - start,
    }


def soup_lora(
    a: Tensor, b: Tensor, scale: float, settings: SoupSettings | None = None
) -> tuple[Tensor, Tensor, Edit | None]:
    """A' (r, n) and B' (m, r) in float64 with B' A' the edit of scale * B A, without forming it; no edit where that is zero."""
    settings, a, b = settings or SoupSettings(), a.double(), b.double()
    (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    left, sigma, right = torch.linalg.svd(scale * r_b @ r_a.T, full_matrices=False)
    if not sigma[0] > 0:
        return a, b, None
    edit = weights_of(sigma, settings.mode, settings.energy)
    sigma = torch.where(sigma > NOISE * sigma[0], sigma, 0.0)
    sigma[: edit.k] *= edit.lambda_high
    sigma[edit.k :] *= edit.lambda_low
    half, missing = sigma.sqrt(), a.shape[0] - len(sigma)  # the rank may be above m or n
    new_b = torch.nn.functional.pad(q_b @ (left * half), (0, missing))
    new_a = torch.nn.functional.pad((half[:, None] * right) @ q_a.T, (0, 0, 0, missing))
    return new_a, new_b, edit


# --- whole checkpoints ---


@dataclass
class SoupReport:
    """What was edited and how much: a row a tensor (with `skipped` where it was kept as fine-tuned), totals, and warnings."""

    tensors: list[dict[str, Any]]
    totals: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    directory: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)


@dataclass
class SoupPlan:
    """What becomes of each tensor, decided from names, shapes and types: (names that share it, the base's name, why it is kept)."""

    base: Checkpoint
    tuned: Checkpoint
    settings: SoupSettings
    items: list[tuple[list[str], str | None, str | None]]
    warnings: list[str]

    def soup(self, item: tuple[list[str], str | None, str | None]) -> tuple[Tensor, dict[str, Any]]:
        """The tensor of an item, and its row in the report."""
        names, other, reason = item
        tuned = self.tuned.checked(names[0], infinity=reason is not None)
        if reason is None:
            assert other is not None
            value, row = soup_tensor(self.base.checked(other), tuned, self.settings)
        else:
            value, row = tuned, {"skipped": reason}
        tied = {"tied": names[1:]} if len(names) > 1 else {}
        return value, {"name": names[0], "shape": list(tuned.shape), **tied, **row}


def plan_soup(base: Source, tuned: Source, settings: SoupSettings | None = None) -> SoupPlan:
    """Match two checkpoints without reading their tensors; raises InputError where nothing can be done with them."""
    settings = settings or SoupSettings()
    before, after = as_checkpoint(base, "base"), as_checkpoint(tuned, "tuned")
    names = counterparts(before, after)
    items, messages = [], []
    missing: list[str] = []
    compared = chosen = 0
    for group in after.groups():
        other = next((names[name] for name in group if names[name] is not None), None)
        name, shape = group[0], after.shapes[group[0]]
        reason = None
        if other is None:
            missing += group
            reason = "not in the base"
        elif len(shape) < 2 or 0 in shape:
            reason = "not a matrix"
        elif not (after.dtypes[name].is_floating_point and before.dtypes[other].is_floating_point):
            reason = "not floating point"
        elif shape != before.shapes[other]:
            reason = "another shape in the base"
            messages.append(
                f"'{name}' has shape {_by(shape)} in '{after.label}' and {_by(before.shapes[other])} in '{before.label}' "
                f"({abs(shape[0] - before.shapes[other][0])} rows differ): it is kept as fine-tuned"
            )
        else:
            compared += 1
            if not settings.wants(name):
                reason = "left out by name"
            else:
                chosen += 1
        items.append((group, other, reason))
    if missing and settings.strict:
        raise InputError(f"'{before.label}' lacks {len(missing)} tensors of '{after.label}', e.g. '{missing[0]}'")
    if not compared:
        raise InputError(
            f"no matrix is in both '{before.label}' and '{after.label}': the two checkpoints have nothing in common. Are the prefixes "
            f"right? One has '{next(iter(before), None)}', the other '{next(iter(after), None)}'"
        )
    if not chosen:
        raise InputError(f"--include and --exclude leave none of the {compared} matrices that both checkpoints have")
    if missing:
        messages.insert(
            0, f"'{before.label}' lacks {len(missing)} tensors, e.g. '{missing[0]}': they are kept as fine-tuned"
        )
    return SoupPlan(before, after, settings, items, messages)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def make_report(
    rows: list[dict[str, Any]], settings: SoupSettings, notes: list[str], seconds: float, half: bool
) -> SoupReport:
    """`half`: whether the weights are stored in a type of two bytes."""
    edited = [row for row in rows if "skipped" not in row]
    messages, relative = list(notes), sorted(row.get("relative_norm") or math.inf for row in edited)
    if not edited:
        messages.append("fine-tuning changed none of these weights: the result equals the input")
    if half and relative and relative[len(relative) // 2] < WEAK:
        messages.append(
            f"fine-tuning changed the weights by {relative[len(relative) // 2]:.2%} (median), which is not much more than the rounding of "
            "bfloat16 or float16. Such noise makes spectra flat and the edit weak: use float32 checkpoints, or the LoRA adapter"
        )
    moved = [f"'{row['name']}'" for row in rows if "note" in row]
    if moved:
        messages.append(f"out of memory on {settings.device}: {', '.join(moved)} done on the CPU")

    def mean(key: str) -> float | None:
        return sum(row[key] for row in edited) / len(edited) if edited else None

    return SoupReport(
        rows,
        {
            "mode": settings.mode,
            "tensors": len(rows),
            "edited": len(edited),
            "reasons": {
                reason: sum(row.get("skipped") == reason for row in rows)
                for reason in sorted({row["skipped"] for row in rows if "skipped" in row})
            },
            "lambda_low": mean("lambda_low"),
            "energy": mean("energy"),
            "seconds": seconds,
        },
        messages,
    )


def monosoup(base: Source, tuned: Source, **settings: Any) -> tuple[dict[str, Tensor], SoupReport]:
    """Edit the fine-tuned state dict `tuned` of the model whose state dict was `base`; both may be paths of checkpoints.

    Returns the new state dict and a `SoupReport`. Tensors that share storage in `tuned` share it in the result. `settings` are the
    fields of `SoupSettings`: mode, energy, solver, include, exclude, strict, device.

    Raises ValueError for arguments out of range, InputError for checkpoints that do not fit together or hold NaN.
    """
    start, plan = time.perf_counter(), plan_soup(base, tuned, SoupSettings(**settings))
    state: dict[str, Tensor] = {}
    rows = []
    for item in plan.items:
        value, row = plan.soup(item)
        state.update(dict.fromkeys(item[0], value))
        rows.append(row)
    report = report_of(plan, rows, time.perf_counter() - start)
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    return {name: state[name] for name in plan.tuned}, report


def report_of(plan: SoupPlan, rows: list[dict[str, Any]], seconds: float) -> SoupReport:
    half = any(plan.tuned.dtypes[names[0]].itemsize == 2 for names, _, reason in plan.items if reason is None)
    return make_report(rows, plan.settings, plan.warnings, seconds, half)


@torch.no_grad()
def monosoup_(model: nn.Module, base: Source, **settings: Any) -> SoupReport:
    """Edit a fine-tuned model in place; `base` is the state dict (or the checkpoint) it was tuned from. Settings as for `monosoup`."""
    state = model.state_dict()
    soup, report = monosoup(base, in_memory(type(model).__name__, state), **settings)
    for name, value in soup.items():
        if value.data_ptr() != state[name].data_ptr():
            state[name].copy_(value)
    return report
