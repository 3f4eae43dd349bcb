"""A Gaussian process over a matrix, seen through a few inducing values: the mathematics behind `bayesian_lora`.

A factor W (r x n) has independent standard normal entries a priori, times a constant s. With bases Z_r (a x r), Z_c (b x n)
and diagonal noise D_r, D_c, the inducing values U (a x b) are jointly normal with W:

    Psi_r = Z_r Z_r^T + D_r^2 = L_r L_r^T,   Psi_c likewise,   P_r = L_r^-1 Z_r,   P_c = L_c^-1 Z_c
    U = L_r V L_c^T with p(V) = N(0, I);   E[W|V] = s P_r^T V P_c;   Cov[W|V] = s^2 lambda^2 (I - P_r^T P_r (x) P_c^T P_c)

All of it works on stacks: leading dimensions are factors, then draws, so that hundreds of small problems are a few calls.

Sources: Ritter et al., "Sparse Uncertainty Representation in Deep Learning with Inducing Weights", NeurIPS 2021 (the prior, the
sampler, the posterior families); "Bayesian-LoRA", arXiv 2601.21003 (its use on LoRA factors, the flow).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acclimate.errors import InputError

Raw = Mapping[str, Tensor]  # unconstrained parameters of a posterior family, stacked (G, ...)
Scale = Callable[[Tensor], Tensor]  # unconstrained number -> standard deviation

BASE_JITTER = 1e-6  # of the mean of the diagonal
LARGEST_JITTER = 1e-2


class NonFiniteError(InputError, ValueError):
    """A parameter of the posterior is not a finite number."""


# --- from free numbers to positive ones ---


def positive(raw: Tensor) -> Tensor:
    return F.softplus(raw)


def inverse_positive(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).expm1().log())


def bounded(maximum: float) -> Scale:
    """maximum * sigmoid(10 raw): half of the maximum at 0."""
    return lambda raw: maximum * torch.sigmoid(10 * raw)


def clamped(maximum: float) -> Scale:
    """softplus(raw), at most `maximum`: the published form."""
    return lambda raw: positive(raw).clamp(max=maximum)


# --- bases ---


def cholesky(matrix: Tensor, names: Sequence[str] = ()) -> Tensor:
    """Lower Cholesky factors of (G, k, k). What is not positive definite gets jitter on its diagonal, from 1e-6 of its mean in
    steps of ten to 1e-2, and at last its eigenvalues raised to that.

    Raises NonFiniteError, with the name of the member, for entries that are not finite.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    finite = torch.isfinite(matrix).flatten(1).all(1)
    if not bool(finite.all()):
        which = int(finite.logical_not().nonzero()[0])
        name = names[which] if names else f"factor {which}"
        raise NonFiniteError(
            f"the weights or the posterior of '{name}' are not finite numbers. Try a lower learning rate"
        )
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(matrix.dtype).tiny)[:, None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = BASE_JITTER
    while jitter <= LARGEST_JITTER * 1.001:
        repaired = torch.where(failed[:, None, None] > 0, matrix + jitter * size * eye, matrix)
        factor, still = torch.linalg.cholesky_ex(repaired)
        if not bool(still.any()):
            return factor
        jitter *= 10
    values, vectors = torch.linalg.eigh(matrix)
    root = torch.maximum(values, LARGEST_JITTER * size[..., 0]).sqrt()
    # A = (V root)(V root)^T = R^T R for the QR of its transpose
    upper = torch.linalg.qr((vectors * root[:, None]).mT).R
    lowest = (upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None]).mT
    return torch.where(failed[:, None, None] > 0, lowest, torch.linalg.cholesky_ex(matrix)[0])


class Basis(NamedTuple):
    """One side of a factor of length n seen through k inducing directions."""

    projection: Tensor  # P = L^-1 Z (G, k, n)
    factor: Tensor  # L (G, k, k), the Cholesky factor of Z Z^T + D^2
    gram: Tensor  # Z Z^T (G, k, k)
    noise: Tensor  # D (G, k)


def basis(directions: Tensor, noise: Tensor, names: Sequence[str] = ()) -> Basis:
    """From Z (G, k, n) and the diagonal D > 0 (G, k)."""
    gram = directions @ directions.mT
    factor = cholesky(gram + torch.diag_embed(noise.square()), names)
    return Basis(torch.linalg.solve_triangular(factor, directions, upper=False), factor, gram, noise)


class Noise(NamedTuple):
    """Standard normal numbers behind K draws of G factors, and the member of an ensemble."""

    weight: Tensor  # E (G, K, r, n)
    inducing: Tensor  # three residuals and the posterior's own (4, G, K, a, b)
    member: Tensor  # uniform in [0, 1) (G, K)


def draw_noise(
    shape: tuple[int, int, int, int, int, int], like: Tensor, generator: torch.Generator | None = None
) -> Noise:
    """Noise of shape (G, K, r, n, a, b); a CPU `generator` gives the same numbers for a model on any device."""
    groups, draws, r, n, a, b = shape
    source = like.device if generator is None else generator.device

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=source, dtype=like.dtype).to(like.device)

    member = torch.rand((groups, draws), generator=generator, device=source, dtype=like.dtype).to(like.device)
    return Noise(normal(groups, draws, r, n), normal(4, groups, draws, a, b), member)


def matheron(
    rank: Basis, wide: Basis, spread: Tensor, strength: Tensor, scale: float, noise: Noise, names: Sequence[str] = ()
) -> Tensor:
    """W minus its mean, (G, K, r, n): s [P_r^T spread P_c + lambda (E - P_r^T U P_c)], by Matheron's rule.

    `spread` is V - E[V] (G, K, a, b), `strength` lambda (G,). U is the whitened value that E has at the inducing points: its
    residual makes it N(0, I) together with E, so that what is taken from E is exactly its part in the span.
    """
    p_r, p_c = rank.projection[:, None], wide.projection[:, None]
    l_r, l_c = rank.factor[:, None], wide.factor[:, None]
    d_r, d_c = rank.noise[:, None, :, None], wide.noise[:, None, None, :]
    roots = []
    for side in (rank, wide):  # the gram matrix alone is singular where a basis has more rows than columns
        jitter = BASE_JITTER * side.gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(side.gram.shape[-1], dtype=side.gram.dtype, device=side.gram.device)
        roots.append(cholesky(side.gram + jitter[:, None, None] * eye, names)[:, None])
    first, second, third, _ = noise.inducing
    residual = roots[0] @ first * d_c + d_r * (second @ roots[1].mT) + d_r * third * d_c
    residual = torch.linalg.solve_triangular(l_r, residual, upper=False)
    residual = torch.linalg.solve_triangular(l_c.mT, residual, upper=True, left=False)
    strength = strength[:, None, None, None]
    inducing = p_r @ (noise.weight @ p_c.mT) + residual
    return scale * (strength * noise.weight + p_r.mT @ (spread - strength * inducing) @ p_c)


def conditional_kl(strength: Tensor, size: int) -> Tensor:
    """KL of N(m, lambda^2 C) from N(m, C) in `size` dimensions: size (lambda^2/2 - 1/2 - ln lambda)."""
    return size * (0.5 * strength.square() - 0.5 - strength.log())


# --- the posterior q(V) of the whitened inducing values ---


class Family(NamedTuple):
    """A family of normal posteriors with mean mu (G, a, b): its free numbers, draws and KL from N(0, I).

    `start(a, b, members)`: their initial values. `spread(raw, sd, xi, member)`: V - mu (G, K, a, b) from standard normal xi.
    `kl(raw, sd, mu)`: (G,). `sd` turns a free number into a standard deviation.
    """

    start: Callable[[int, int, int], dict[str, Tensor]]
    spread: Callable[[Raw, Scale, Tensor, Tensor], Tensor]
    kl: Callable[[Raw, Scale, Tensor], Tensor]


def _sum(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


def _normal_kl(sd: Tensor, mu: Tensor) -> Tensor:
    return 0.5 * _sum(sd.square() + mu.square() - 1 - 2 * sd.log())


def _lower(raw: Tensor, diagonal: Tensor) -> Tensor:
    return raw.tril(-1) + torch.diag_embed(diagonal)


def _diagonal(raw: Tensor) -> Tensor:
    return raw.diagonal(dim1=-2, dim2=-1)


def _matrix_roots(raw: Raw, sd: Scale) -> tuple[Tensor, Tensor]:
    rank, wide = (_lower(raw[name], sd(_diagonal(raw[name])).sqrt()) for name in ("sd_rank", "sd_wide"))
    return rank, wide


def _matrix_spread(raw: Raw, sd: Scale, xi: Tensor, member: Tensor) -> Tensor:
    rank, wide = _matrix_roots(raw, sd)
    return rank[:, None] @ xi @ wide[:, None].mT


def _matrix_kl(raw: Raw, sd: Scale, mu: Tensor) -> Tensor:
    rank, wide = _matrix_roots(raw, sd)
    (a, b), log_rank, log_wide = mu.shape[-2:], _sum(_diagonal(rank).log()), _sum(_diagonal(wide).log())
    return 0.5 * (_sum(rank.square()) * _sum(wide.square()) + _sum(mu.square()) - a * b) - b * log_rank - a * log_wide


def _full_root(raw: Raw, sd: Scale) -> Tensor:
    return _lower(raw["sd"], sd(_diagonal(raw["sd"])))


def _full_spread(raw: Raw, sd: Scale, xi: Tensor, member: Tensor) -> Tensor:
    return (xi.flatten(2) @ _full_root(raw, sd).mT).unflatten(2, xi.shape[2:])


def _full_kl(raw: Raw, sd: Scale, mu: Tensor) -> Tensor:
    root = _full_root(raw, sd)
    return 0.5 * (_sum(root.square()) + _sum(mu.square()) - mu[0].numel()) - _sum(_diagonal(root).log())


def _offsets(raw: Raw) -> Tensor:
    """Members' means around mu (G, K, a, b); centred, so that mu stays the mean of the posterior."""
    return raw["offsets"] - raw["offsets"].mean(1, keepdim=True)


def _ensemble_spread(raw: Raw, sd: Scale, xi: Tensor, member: Tensor) -> Tensor:
    offsets = _offsets(raw)
    index = (member * offsets.shape[1]).long().clamp(max=offsets.shape[1] - 1)
    chosen = torch.gather(offsets, 1, index[..., None, None].expand(-1, -1, *offsets.shape[2:]))
    return chosen + sd(raw["sd"])[:, None] * xi


def _ensemble_kl(raw: Raw, sd: Scale, mu: Tensor) -> Tensor:
    """Mean of the members' KLs: an upper bound of the mixture's (the KL is convex), exact where the members coincide."""
    offsets = _offsets(raw)
    each = [_normal_kl(sd(raw["sd"]), mu + offsets[:, k]) for k in range(offsets.shape[1])]
    return torch.stack(each).mean(0)


FAMILIES: dict[str, Family] = {
    "diagonal": Family(
        start=lambda a, b, members: {"sd": torch.zeros(a, b)},
        spread=lambda raw, sd, xi, member: sd(raw["sd"])[:, None] * xi,
        kl=lambda raw, sd, mu: _normal_kl(sd(raw["sd"]), mu),
    ),
    "matrix": Family(
        start=lambda a, b, members: {"sd_rank": torch.zeros(a, a), "sd_wide": torch.zeros(b, b)},
        spread=_matrix_spread,
        kl=_matrix_kl,
    ),
    "full": Family(
        start=lambda a, b, members: {"sd": torch.zeros(a * b, a * b)},
        spread=_full_spread,
        kl=_full_kl,
    ),
    "ensemble": Family(
        start=lambda a, b, members: {"sd": torch.zeros(a, b), "offsets": 0.1 * torch.randn(members, a, b)},
        spread=_ensemble_spread,
        kl=_ensemble_kl,
    ),
}


# --- a flow on the rows of V ---

FLOW_HIDDEN = 16


def flow_start(width: int) -> dict[str, Tensor]:
    """Free numbers of an autoregressive affine map of rows of `width` numbers; it starts as the identity."""
    bound = width**-0.5
    return {
        "flow_in": torch.empty(FLOW_HIDDEN, width).uniform_(-bound, bound),
        "flow_in_bias": torch.zeros(FLOW_HIDDEN),
        "flow_out": torch.zeros(2 * width, FLOW_HIDDEN),
        "flow_out_bias": torch.zeros(2 * width),
    }


def flow(raw: Raw, rows: Tensor) -> tuple[Tensor, Tensor]:
    """y_j = x_j exp(a_j(x_<j)) + b_j(x_<j) for every row of (G, K, a, b), and ln|det dy/dx| (G, K).

    One hidden tanh layer, masked as in Germain et al., "MADE", 2015; the map of Papamakarios et al., "Masked Autoregressive
    Flow", 2017, in the direction in which drawing is one pass.
    """
    width = rows.shape[-1]
    inputs = torch.arange(1, width + 1, device=rows.device)
    hidden = torch.arange(FLOW_HIDDEN, device=rows.device) % max(width - 1, 1) + 1
    see_in = (hidden[:, None] >= inputs).to(rows.dtype)
    see_out = (inputs[:, None] > hidden).to(rows.dtype).repeat(2, 1)
    state = torch.tanh(rows @ (raw["flow_in"] * see_in)[:, None].mT + raw["flow_in_bias"][:, None, None])
    log_scale, shift = (state @ (raw["flow_out"] * see_out)[:, None].mT + raw["flow_out_bias"][:, None, None]).chunk(
        2, -1
    )
    return rows * log_scale.exp() + shift, log_scale.flatten(2).sum(2)


def flow_kl(raw: Raw, sd: Tensor, mu: Tensor, xi: Tensor) -> Tensor:
    """One-sample estimate (G,) of the KL of flow(N(mu, sd^2)) from N(0, I): ln q0(v0) - ln|det| - ln p(v)."""
    start = mu[:, None] + sd[:, None] * xi
    end, log_det = flow(raw, start)
    of_start = -(0.5 * xi.square() + sd[:, None].log()).flatten(2).sum(2)
    of_end = -0.5 * end.square().flatten(2).sum(2)
    return (of_start - log_det - of_end).mean(1)
