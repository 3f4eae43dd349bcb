"""CircuMerge: merge the low-rank changes of T adapters to a layer through small matrices, never forming the change itself.

A layer's adapters are Delta_t = s_t B_t A_t with B_t (m x r_t), A_t (r_t x n); side by side B = [B_1 .. B_T] (m x R) and
A = [A_1; ..; A_T] (R x n), R = sum r_t. With nearly orthonormal Q_B, Q_A and B = Q_B K_B, A^T = Q_A K_A, task t is the small

    M_t = s_t K_B[:, t] K_A[:, t]^T  (p x q),   Delta_t = Q_B M_t Q_A^T  exactly.

A rule (acclimate.merge.rules) makes M* of {w_t M_t}, a truncated SVD cuts it to the rank asked for, and
B_out = Q_B X sqrt(Sigma), A_out = sqrt(Sigma) Y^T Q_A^T is an ordinary LoRA pair of scale 1.

The bases come from a sketch S = Phi B (s x R) with Phi = sqrt(d'/s) S C Z D: random signs D, zero padding Z to a length d' with a
fast FFT, an orthogonal random circulant C, and s of the d' rows. One transform serves all tasks and all layers of a dimension.
From S^T S = R1^T R1 (Cholesky) U = B R1^-1 is nearly orthonormal. `refine=1` repeats the step on U itself, in working precision.
`basis="gram"` takes B^T B in float64 in place of the sketch's; `basis="svd"` is a float64 SVD of B (Core Space merging).

Time per layer O((m log m + n log n) R + (m + n) R^2 + R^3). Memory is that of one batch of layers of the same shape. On a GPU, where
float64 is slow, only R x R work and products with thin matrices use it. Nothing is communicated between processes.

Source: "Sketch-Based Low-Rank Model Merging with Shared Circulant Transforms" (CircuMerge), ICML 2026. Unit-modulus spectra, the
repeated Cholesky step and the choice of s are ours. Core Space: Panariello et al., arXiv 2509.17786.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy.fft import next_fast_len
from torch import Tensor

from acclimate.errors import did_you_mean
from acclimate.linalg import effective_rank, eigh_descending, fix_signs
from acclimate.merge import rules
from acclimate.merge.rules import RuleFunction, RuleName

Basis = Literal["auto", "circulant", "gram", "svd"]
THRESHOLD = 1e-6  # directions smaller than this share of the largest are taken for zero
CHUNK = 2**20  # numbers in one piece of a long product or transform: it stays in the cache and memory stays flat

# Seconds of a core of 2025 for one multiply-add in float64 and float32, and for one point of a transform and back. Constants, and not
# measured anew, so that basis="auto" always chooses the same.
_DOUBLE, _SINGLE, _POINT, _SMALL = 4e-11, 2e-11, 1.4e-10, 2e-9


@dataclass(frozen=True)
class MergeSettings:
    """How to merge. Raises ValueError for a value outside its range.

    `rule`: sum, mean, ties, dare, dare_ties, tsv (default), iso, tsv_iso, or a function of (list of p x q matrices, weights).
    `rank` of the result: a number, "auto:E" for the smallest that keeps the share E of the squared norm, None for the largest
    rank among the inputs. `scale` multiplies the result. `density` (ties) is the share of entries kept, `drop` (dare) the share
    dropped, `sign` how ties elects. `sketch`: rows of the sketch per column. `refine`: None is 0 for the Gram basis of float32
    factors, which needs none, and for sum and mean with basis="circulant" (the cut to a rank is then some per cent worse than the
    best), else 1. `basis="auto"` takes the cheaper of circulant and gram, the sketch on a GPU. `space="sketch"` applies the
    rule to the sketches themselves, for study.
    """

    rule: RuleName | RuleFunction = "tsv"
    rank: int | str | None = None
    scale: float = 1.0
    density: float = 0.3
    drop: float = 0.3
    sign: Literal["total", "frequency"] = "total"
    sketch: float = 4.0
    refine: int | None = None
    space: Literal["core", "sketch"] = "core"
    basis: Basis = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.rule):
            _one_of("rule", self.rule, get_args(RuleName))
        _one_of("basis", self.basis, get_args(Basis))
        _one_of("space", self.space, ("core", "sketch"))
        _one_of("sign", self.sign, ("total", "frequency"))
        if self.refine not in (None, 0, 1):
            raise ValueError(f"refine is 0 or 1, not {self.refine!r}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density}")
        if not 0 < self.drop < 1:
            raise ValueError(f"drop must be above 0 and below 1, not {self.drop}")
        if not (math.isfinite(self.sketch) and self.sketch >= 1):
            raise ValueError(f"sketch must be at least 1 row per column, not {self.sketch}")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be a finite number, not {self.scale}")
        if self.space == "sketch" and self.basis not in ("auto", "circulant"):
            raise ValueError(f"space='sketch' needs the circulant basis, not '{self.basis}'")
        if isinstance(self.rank, str):
            _ = self.kept_share
        elif self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    @property
    def kept_share(self) -> float | None:
        """E of rank="auto:E"."""
        if not isinstance(self.rank, str):
            return None
        word, _, number = self.rank.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if word != "auto" or not 0 < share <= 1:
            raise ValueError(
                f"rank is a number or auto:E with E above 0 and at most 1, e.g. auto:0.95, not '{self.rank}'"
            )
        return share

    @property
    def rule_name(self) -> str:
        return getattr(self.rule, "__name__", "function") if callable(self.rule) else self.rule


def _one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {', '.join(known)}; not '{value}'.{did_you_mean(str(value), known)}")


@dataclass(frozen=True)
class CirculantTransform:
    """Phi_{d,s}: (..., d) -> (..., s), an isometry on average over seeds, and exactly where no rows are left out."""

    signs: Tensor  # (d,)
    spectrum: Tensor  # (d'/2 + 1,), of modulus 1
    length: int  # d'
    rows: Tensor | None  # (s,), None for all

    def __call__(self, x: Tensor) -> Tensor:
        turned = torch.fft.irfft(torch.fft.rfft(x * self.signs, n=self.length) * self.spectrum, n=self.length)
        if self.rows is None:
            return turned
        return turned[..., self.rows] * math.sqrt(self.length / len(self.rows))


@lru_cache(maxsize=64)
def circulant_transform(
    d: int, s: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> CirculantTransform:
    """The shared transform of dimension `d`, sketch size `s` and seed; all d' rows where s >= d'."""
    random = np.random.default_rng([seed, d, s])
    length = next_fast_len(d, real=True)
    signs = random.integers(0, 2, d) * 2.0 - 1.0
    spectrum = np.exp(2j * np.pi * random.random(length // 2 + 1))
    spectrum[0] = 1  # these two must be real for the circulant to be
    if length % 2 == 0:
        spectrum[-1] = 1
    rows = None if s >= length else torch.from_numpy(random.permutation(length)[:s]).to(device)
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return CirculantTransform(
        torch.from_numpy(signs).to(device, dtype), torch.from_numpy(spectrum).to(device, complex_dtype), length, rows
    )


def sketch_size(d: int, columns: int, factor: float) -> int:
    """ceil(factor R), or all d' rows where that would be more than half of them."""
    length, size = next_fast_len(d, real=True), math.ceil(factor * columns)
    return length if size > length / 2 else size


class RankDeficient(Exception):  # noqa: N818 - a case to be treated, not a fault
    """A batch has a layer with dependent columns; its layers have to be merged one by one."""


@dataclass
class Side:
    """One side of a batch of L layers: B^T or A as `rows` (L, R, d) = K^T Q^T, with Q^T = mix^T rows."""

    rows: Tensor
    mix: Tensor  # (L, R, p) float64
    K: Tensor  # (L, p, R) float64
    sketch: Tensor | None = None  # (L, R, s), kept for space="sketch"
    sketch_size: int | None = None

    def expand(self, small: Tensor) -> Tensor:
        """small (L, k, p) times Q^T: (L, k, d), float64."""
        return _wide_product(small @ self.mix.mT, self.rows)


def orthonormal_side(rows: Tensor, basis: str, settings: MergeSettings, refine: int) -> Side:
    """A nearly orthonormal basis of the columns of rows^T, rows (L, R, d), and the columns' coordinates in it.

    Raises RankDeficient when L > 1 and some layer's columns are dependent.
    """
    if basis == "svd":
        left, sigma, right = torch.linalg.svd(rows.double(), full_matrices=False)
        keep = _kept(sigma)
        K = (left[..., keep] * sigma[..., None, keep]).mT
        unit = torch.eye(K.shape[-2], dtype=K.dtype, device=K.device)
        return Side(right[..., keep, :], unit.expand(len(K), *unit.shape), K)
    sketch, size, columns, d = None, None, *rows.shape[-2:]
    if basis == "circulant":
        size = sketch_size(d, columns, settings.sketch)
        sketch = _sketched(rows, circulant_transform(d, size, settings.seed, rows.dtype, str(rows.device)))
    mix, K = _factor(_gram(rows if sketch is None else sketch))
    if refine and K.numel():
        rows = _wide_product(mix.mT, rows).to(rows.dtype)
        # well-conditioned by now, so that its Gram matrix may be taken in its own precision, unless the sketch was very short
        short = size is not None and size < 2 * columns
        mix, second = _factor(_gram(rows) if short else (rows @ rows.mT).double())
        K = second @ K
    return Side(rows, mix, K, sketch.double() if sketch is not None and settings.space == "sketch" else None, size)


def _sketched(rows: Tensor, transform: CirculantTransform) -> Tensor:
    flat = rows.flatten(0, -2)
    step = max(1, CHUNK // transform.length)
    return torch.cat([transform(part) for part in flat.split(step)]).unflatten(0, rows.shape[:-1])


def _gram(rows: Tensor) -> Tensor:
    """rows rows^T (L, R, R) of (L, R, d), in float64."""
    step = max(1, CHUNK // max(1, rows.shape[:-1].numel()))
    return sum(
        (part.double() @ part.double().mT for part in rows.split(step, dim=-1)), torch.zeros((), dtype=torch.float64)
    )


def _wide_product(small: Tensor, rows: Tensor) -> Tensor:
    """small (L, k, R) @ rows (L, R, d) in float64, rows converted piece by piece."""
    result = torch.empty(*small.shape[:-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
    step = max(1, CHUNK // max(1, rows.shape[:-1].numel()))
    for start in range(0, rows.shape[-1], step):
        result[..., start : start + step] = small @ rows[..., start : start + step].double()
    return result


def _factor(gram: Tensor) -> tuple[Tensor, Tensor]:
    """mix (L, R, p) and K (L, p, R) with mix^T gram mix = I and K^T K = gram: Cholesky, or where dependent, eigenvectors."""
    upper, info = torch.linalg.cholesky_ex(gram, upper=True)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    if not info.any() and (diagonal.amin(-1) >= THRESHOLD * diagonal.amax(-1)).all():
        unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return torch.linalg.solve_triangular(upper, unit.expand_as(upper), upper=True), upper
    if len(gram) > 1:
        raise RankDeficient
    values, vectors = eigh_descending(gram)
    sigma = values.clamp_min(0).sqrt()
    keep = _kept(sigma)
    sigma, vectors = sigma[..., keep], vectors[..., keep]
    return vectors / sigma[..., None, :], sigma[..., :, None] * vectors.mT


def _kept(sigma: Tensor) -> Tensor:
    """Which of the singular values (L, R) are not zero; one answer for a batch."""
    keep = sigma > THRESHOLD * sigma.amax(-1, keepdim=True)
    if len(sigma) > 1 and not keep.all():
        raise RankDeficient
    return keep[0]


def to_principal_axes(side: Side) -> Side:
    """The same side with Q turned to the principal axes of the columns, so that coordinates mean the same in any order of adapters."""
    turn, sigma, vt = torch.linalg.svd(side.K, full_matrices=False)
    vectors = fix_signs(vt.mT)
    signs = (vectors * vt.mT).sum(-2).sign()
    return replace(side, mix=(side.mix @ turn) * signs[..., None, :], K=sigma[..., :, None] * vectors.mT)


@dataclass
class Core:
    """Merged layers of one shape before they are cut to a rank: M* = left right^T with orthonormal right, largest first."""

    b: Side
    a: Side
    left: Tensor  # (L, p, q)
    right: Tensor  # (L, q, q)
    sigma: Tensor  # (L, q)
    erank_in: Tensor  # (L,) of [w_1 Delta_1 .. w_T Delta_T]
    basis: str

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """A (L, rank, n) and B (L, m, rank) in float64, the best approximation of this rank; zeros where less is needed."""
        root = self.sigma[..., :rank].sqrt()
        inverse = torch.where(root > 0, 1 / root, 0.0)
        b = self.b.expand((self.left[..., :rank] * inverse[..., None, :]).mT).mT
        a = self.a.expand((self.right[..., :rank] * root[..., None, :]).mT)
        missing = rank - root.shape[-1]
        return torch.nn.functional.pad(a, (0, 0, 0, max(0, missing))), torch.nn.functional.pad(b, (0, max(0, missing)))


def merge_core(
    b_rows: Tensor,
    a_rows: Tensor,
    ranks: Sequence[int],
    scales: Sequence[Tensor],
    weights: Sequence[float],
    settings: MergeSettings,
    names: Sequence[str],
    total_weight: float | None = None,
) -> Core:
    """Merge L layers of one shape.

    `b_rows` (L, R, m) and `a_rows` (L, R, n): the tasks' factors B_t^T and A_t one below the other, `ranks` rows each; `scales`: the
    s_t (L,) of each task; `names` of the layers (L), which seed the masks of dare; `total_weight` is what mean divides by (there may
    be tasks that do not adapt these layers). Raises RankDeficient when L > 1 and a layer's columns are dependent.
    """
    basis = choose_basis(settings, b_rows, a_rows)
    refine = refinement(settings, basis, b_rows.dtype)
    b = orthonormal_side(b_rows, basis, settings, refine)
    a = orthonormal_side(a_rows, basis, settings, refine)
    if not b.K.numel() or not a.K.numel():  # one side is zero, and with it every task's change
        empty = [side.K.new_zeros(*side.K.shape[:-1], 0) for side in (b, a)]
        return Core(b, a, empty[0], empty[1], b.K.new_zeros(len(names), 0), b.K.new_zeros(len(names)), basis)
    if settings.space == "core" and settings.rule not in rules.COORDINATE_FREE:
        b, a = to_principal_axes(b), to_principal_axes(a)
    ends = np.cumsum([0, *ranks]).tolist()
    parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
    if settings.space == "core":
        left, right = [b.K[..., part] for part in parts], [a.K[..., part] for part in parts]
    else:
        assert b.sketch is not None
        assert a.sketch is not None
        left, right = ([s[..., part, :].mT for part in parts] for s in (b.sketch, a.sketch))
    left = [scale[:, None, None] * k for scale, k in zip(scales, left, strict=True)]
    source = settings.scale * _apply_rule(left, right, weights, settings, names, total_weight)
    merged = rules.isotropic(source) if settings.rule in ("iso", "tsv_iso") else source
    if settings.space == "sketch":
        lift_b, lift_a = (side.K @ torch.linalg.pinv(side.sketch.mT) for side in (b, a) if side.sketch is not None)
        source, merged = (lift_b @ matrix @ lift_a.mT for matrix in (source, merged))
    # of an isotropic matrix every cut to a rank is as good; the source of its directions tells which of them matter
    vectors = eigh_descending(source.mT @ source)[1]
    turned = merged @ vectors
    stacked = sum(
        (w * s).square()[:, None, None] * k @ (other.mT @ other) @ k.mT
        for w, s, k, other in zip(
            weights, scales, [b.K[..., p] for p in parts], [a.K[..., p] for p in parts], strict=True
        )
    )
    assert isinstance(stacked, Tensor)
    erank_in = effective_rank(torch.linalg.eigvalsh(stacked).clamp_min(0).sqrt())
    # norms of the columns rather than roots of eigenvalues: these lose what is below 1e-8 of the largest
    return Core(b, a, turned, vectors, turned.norm(dim=-2), erank_in, basis)


def _apply_rule(
    left: list[Tensor],
    right: list[Tensor],
    weights: Sequence[float],
    settings: MergeSettings,
    names: Sequence[str],
    total_weight: float | None,
) -> Tensor:
    """The rule's M* (L, p, q); for iso and tsv_iso, what is to be made isotropic."""
    rule = settings.rule
    shape = left[0].shape[:-1] + right[0].shape[-2:-1]
    if callable(rule):
        tasks = rules.compact(left, right)
        results = [rule([task[index] for task in tasks], list(weights)) for index in range(len(names))]
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, Tensor) or result.shape != shape[1:] or not result.isfinite().all():
                raise ValueError(
                    f"the rule {settings.rule_name} must return a finite tensor of shape {tuple(shape[1:])} for '{name}'"
                )
        return torch.stack(results).to(left[0])
    left = [weight * factor for weight, factor in zip(weights, left, strict=True)]
    if rule in ("sum", "iso"):
        return rules.task_sum(left, right)
    if rule == "mean":
        return rules.task_sum(left, right) / (sum(weights) if total_weight is None else total_weight)
    if rule == "ties":
        return rules.elect(
            [rules.trim(a @ b.mT, settings.density) for a, b in zip(left, right, strict=True)], settings.sign
        )
    if rule in ("dare", "dare_ties"):
        tasks = [
            rules.drop_randomly(a @ b.mT, settings.drop, f"{settings.seed}:{task}", names)
            for task, (a, b) in enumerate(zip(left, right, strict=True))
        ]
        return sum(tasks, torch.zeros_like(tasks[0])) if rule == "dare" else rules.elect(tasks, settings.sign)
    return rules.task_singular_vectors(left, right)


def refinement(settings: MergeSettings, basis: str, dtype: torch.dtype) -> int:
    """Whether the Cholesky step is repeated: what was asked for, or what the rule and the basis need."""
    if settings.refine is not None:
        return settings.refine
    precise = basis == "gram" and dtype == torch.float32  # formed and applied in float64, this basis is good to float32
    # a sum is the same in every basis, but the best cut to a rank needs an orthonormal one: not left out unless asked for by name
    linear = settings.rule in rules.LINEAR and settings.basis == "circulant"
    return 0 if linear or precise else 1


def choose_basis(settings: MergeSettings, b_rows: Tensor, a_rows: Tensor) -> str:
    """circulant or gram for basis="auto": the cheaper one on a CPU, and the sketch on a GPU, where float64 is slow."""
    if settings.basis != "auto":
        return settings.basis
    if settings.space == "sketch" or b_rows.device.type != "cpu":
        return "circulant"
    columns, sizes = b_rows.shape[-2], (b_rows.shape[-1], a_rows.shape[-1])
    costs = {basis: basis_seconds(settings, basis, columns, sizes, b_rows.dtype) for basis in ("circulant", "gram")}
    return min(costs, key=costs.__getitem__)


def basis_seconds(
    settings: MergeSettings, basis: str, columns: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> float:
    """Predicted time of the two bases of one layer with `columns` = R and `sizes` = (m, n) on one core."""
    refine, total = refinement(settings, basis, dtype), 0.0
    for d in sizes:
        product = d * columns**2
        if basis == "svd":
            total += 12 * _DOUBLE * product
        elif basis == "gram":
            total += _DOUBLE * product * (1 + refine) + _SINGLE * product * refine
        else:
            length = next_fast_len(d, real=True)
            total += _POINT * columns * length * math.log2(length)
            total += _DOUBLE * sketch_size(d, columns, settings.sketch) * columns**2
            total += (_DOUBLE + _SINGLE) * product * refine
    return total


def merge_seconds(settings: MergeSettings, columns: int, m: int, n: int) -> float:
    """Predicted time of one layer on one core, without reading and writing."""
    bases = ("circulant", "gram") if settings.basis == "auto" else (settings.basis,)
    return min(basis_seconds(settings, basis, columns, (m, n)) for basis in bases) + _SMALL * columns**3
