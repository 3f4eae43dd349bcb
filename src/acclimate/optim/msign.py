"""The nearest matrix with singular values 1, msign(D) = U V^T of D = U S V^T, by a few products: what Muon makes of a gradient.

From X = D / (s ||D||_F), five steps X <- a X + (b A + c A^2) X with A = X X^T. `polar_express` (s = 1.1) takes other coefficients in
each step: the best odd quintics, one after another, for singular values of 1e-3 and more. `ns5` (s = 1) takes always the same, and
leaves singular values between 0.68 and 1.14. `svd` is exact.

Where the long side is four times the short one or more, as in LoRA's factors, the steps are made on the small Gram matrix (its
polynomials commute) and D is multiplied once.

Sources: Jordan's Muon; The Polar Express (arXiv 2505.16932).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from acclimate.linalg import polar_factor

OrthogonalMethod = Literal["polar_express", "ns5", "svd"]
Scale = Literal["match_rms_adamw", "spectral", "none"]
Triple = tuple[float, float, float]

NS5: Triple = (3.4445, -4.7750, 2.0315)
MARGIN = {"polar_express": 1.1, "ns5": 1.0}
GRAM_FROM = 4  # long side / short side from which the steps on the Gram matrix are faster
GRAM_UP_TO = 512  # short side; above it a GPU is faster in bfloat16
ALONE_FROM = 256  # short side from which a CPU multiplies matrices faster one by one than as a batch
LOWEST, CUSHION, SAFETY = 1e-3, 0.02, 1.01  # of Polar Express: smallest singular value aimed at, and two guards


@lru_cache
def polar_express_triples() -> tuple[Triple, ...]:
    """The ten (a, b, c): each the odd quintic nearest to 1 on where the ones before it have left the singular values [l, u]."""
    low, high, found = LOWEST, 1.0, []
    for step in range(10):
        guarded = max(low, CUSHION * high)
        a, b, c = _nearest_to_one(guarded, high)
        if guarded > low:  # centre what really comes, [low, high], around 1
            factor = 2 / sum(a * x + b * x**3 + c * x**5 for x in (low, high))
            a, b, c = a * factor, b * factor, c * factor
        if step < 9:  # rounding may have put a singular value a little above `high`
            a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        found.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return tuple(found)


def _nearest_to_one(low: float, high: float) -> Triple:
    """(a, b, c) that minimise the largest |1 - (a x + b x^3 + c x^5)| on [low, high], by Remez' exchange."""
    if low / high > 1 - 5e-6:  # the limit: value 1 and two derivatives 0
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner, error = [(3 * low + high) / 4, (low + 3 * high) / 4], math.inf
    alternating = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for _ in range(100):
        x = torch.tensor([low, *inner, high], dtype=torch.float64)
        system = torch.stack([x, x**3, x**5, alternating], dim=1)
        a, b, c, new = torch.linalg.solve(system, torch.ones_like(x)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)  # extrema: a + 3 b x^2 + 5 c x^4 = 0
        inner = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (1, -1))
        if abs(new - error) < 1e-15:
            break
        error = new
    return a, b, c


def triples(method: OrthogonalMethod, steps: int) -> list[Triple]:
    """The coefficients of each step; after the tenth of Polar Express its last is repeated."""
    if method == "ns5":
        return [NS5] * steps
    known = polar_express_triples()
    return [known[min(step, len(known) - 1)] for step in range(steps)]


def msign(
    d: Tensor,
    method: OrthogonalMethod = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    *,
    compile: bool | str = False,
) -> Tensor:
    """About U V^T (..., m, n) of matrices D = U S V^T (..., m, n); exactly 0 for D = 0.

    Computed, and returned, in `dtype` (None: see `fast_dtype`). "svd" takes float64 inside and leaves directions below 1e-6 of the
    largest singular value out. `compile`: True, or a backend of torch.compile, for the steps on whole matrices.
    """
    dtype = dtype or fast_dtype(d)
    if method == "svd":
        wide = d.shape[-2] < d.shape[-1]
        factor = polar_factor((d.mT if wide else d).double())
        return (factor.mT if wide else factor).to(dtype)
    x, margin, coefficients = d.to(dtype), MARGIN[method], triples(method, steps)
    short, long = sorted(x.shape[-2:])
    if long >= GRAM_FROM * short and dtype in (torch.float32, torch.float64):
        return _by_gram(x, margin, coefficients)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norm > 0, norm, 1.0) if margin == 1 else x / torch.where(norm > 0, margin * norm, 1.0)
    tall = x.shape[-2] > x.shape[-1]
    batch = (x.mT if tall else x).reshape(-1, short, long)
    iterated = _compiled("inductor" if compile is True else compile) if compile else _iterated
    if batch.device.type == "cpu" and short >= ALONE_FROM:
        batch = torch.stack([iterated(one, coefficients) for one in batch])
    else:
        batch = iterated(batch, coefficients)
    x = batch.reshape(*x.shape[:-2], short, long)
    return x.mT if tall else x


def _iterated(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """X (.., m, n), m <= n, after the steps."""
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x


@lru_cache
def _compiled(backend: str) -> Callable[..., Tensor]:
    return torch.compile(_iterated, backend=backend)


def fast_dtype(d: Tensor) -> torch.dtype:
    """float64 for float64; float32 for elongated matrices, whose steps cost little; else bfloat16 where the processor multiplies it
    natively (GPUs, CPUs with AVX-512 BF16 or AMX), float32 where not."""
    if d.dtype == torch.float64:
        return torch.float64
    short, long = sorted(d.shape[-2:])
    if long >= GRAM_FROM * short and short <= GRAM_UP_TO:
        return torch.float32
    return torch.bfloat16 if d.device.type != "cpu" or _cpu_has_bfloat16() else torch.float32


@lru_cache
def _cpu_has_bfloat16() -> bool:
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _by_gram(d: Tensor, margin: float, coefficients: Sequence[Triple]) -> Tensor:
    """The same steps as X_k = Q_k D / (s ||D||_F), where Q_k and A_k = X_k X_k^T are small, symmetric, and commute."""
    tall = d.shape[-2] > d.shape[-1]
    gram = (d.mT @ d if tall else d @ d.mT).reshape(-1, *[min(d.shape[-2:])] * 2)
    square = margin**2 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # (s ||D||_F)^2
    square = torch.where(square > 0, square, 1.0)
    gram, product = gram / square, None
    for step, (a, b, c) in enumerate(coefficients):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
        if step < len(coefficients) - 1:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    product = (product * square.rsqrt()).reshape(*d.shape[:-2], *product.shape[-2:])
    return d @ product if tall else product @ d


@lru_cache
def largest_singular_value(method: OrthogonalMethod, steps: int) -> float:
    """The most that msign can make of a singular value: above 1, as the steps are few."""
    if method == "svd":
        return 1.0
    x = torch.logspace(-6, 0, 100_001, dtype=torch.float64) / MARGIN[method]
    for a, b, c in triples(method, steps):
        x = a * x + b * x**3 + c * x**5
    return float(x.max())


def update_scale(scale: Scale, m: int, n: int) -> float:
    """The factor of O in an update of an (m, n) matrix."""
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1.0, m / n)) if scale == "spectral" else 1.0
