"""Linear algebra that several methods share. Inputs are torch tensors; results are float64 unless said otherwise."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from scipy.linalg import get_blas_funcs
from torch import Tensor


def eigh_descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), largest first, and eigenvectors (..., n, n) in columns, of symmetric matrices.

    Signs are fixed (the largest entry of each vector is positive), so that the same matrix always gives the same vectors.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.flip(-1), fix_signs(vectors.flip(-1))


def fix_signs(vectors: Tensor) -> Tensor:
    """The columns of (..., n, k), each with its largest entry made positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def symmetric_power(matrix: Tensor, exponent: float, floor: float = 1e-6) -> Tensor:
    """matrix^exponent (n, n) of a positive semi-definite matrix, its eigenvalues floored at `floor` times their mean."""
    values, vectors = torch.linalg.eigh(matrix.double())
    values = values.clamp_min(floor * values.mean().clamp_min(torch.finfo(torch.float64).tiny))
    return (vectors * values**exponent) @ vectors.T


def leading_eigh(matrix: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest eigenvalues (k,) and their eigenvectors (n, k) of a symmetric matrix, to working precision.

    Large matrices go to ARPACK's Lanczos iteration from a fixed start, the others to LAPACK; signs are fixed.
    """
    n = matrix.shape[0]
    if n <= 256 or k > n // 8:
        values, vectors = eigh_descending(matrix)
        return values[:k], vectors[:, :k]
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(n)
    values, vectors = eigsh(matrix.double().cpu().numpy(), k=k, which="LA", v0=start)
    return torch.from_numpy(values[::-1].copy()), fix_signs(torch.from_numpy(vectors[:, ::-1].copy()))


def gram_triangle(rows: Tensor) -> Tensor:
    """The lower triangle of z^T z (d, d) of rows z (T, d), in their precision; what is above the diagonal means nothing.

    On a CPU by the BLAS routine for symmetric products, which does half of the work of a matrix product.
    """
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.T @ rows
    syrk = get_blas_funcs("syrk", dtype=rows.numpy().dtype)
    # rows.T is in Fortran's order as it lies; the upper triangle in that order is the lower one in ours
    return torch.from_numpy(syrk(1.0, rows.contiguous().numpy().T).T)


def from_triangle(lower: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle."""
    return lower.tril() + lower.tril(-1).mT


def participation_ratio(matrix: Tensor) -> float:
    """tr(M)^2 / ||M||_F^2 of a positive semi-definite M: how many directions carry it, from 1 to n."""
    return float(matrix.double().trace().square() / matrix.double().square().sum())


def effective_rank(singular_values: Tensor) -> Tensor:
    """exp(entropy) of (..., n) singular values divided by their sum (Roy and Vetterli, 2007): from 1 to n, and 0 for a zero matrix."""
    total = singular_values.sum(-1, keepdim=True)
    shares = singular_values / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def polar_factor(matrix: Tensor, tolerance: float = 1e-6) -> Tensor:
    """P Q^T (..., m, n) of the thin SVD P D Q^T: the nearest matrix with orthonormal columns (symmetric orthogonalisation).

    Directions with D below `tolerance` times the largest are left out, which makes the result unique: a partial isometry. It is taken
    from the n x n Gram matrix, in half the time of an SVD; the error grows with the square of the condition number. float64 in and out.
    """
    values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
    keep = values > tolerance**2 * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
    half = vectors * torch.where(keep, values, torch.inf).rsqrt()[..., None, :]
    return matrix @ (half @ vectors.mT)


def overlap(first: Tensor, second: Tensor) -> float:
    """||first^T second||_F^2 / r of two orthonormal bases (n, r): 1 for the same subspace, r/n on average for random ones."""
    return float((first.double().T @ second.double()).square().sum() / first.shape[1])


def complete_basis(basis: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns (n, size) that begin with `basis` (n, k) and go on with random directions orthogonal to it."""
    missing = size - basis.shape[1]
    if missing <= 0:
        return basis[:, :size]
    random = torch.randn(basis.shape[0], missing, dtype=torch.float64, generator=generator)
    for _ in range(2):  # once more removes what rounding left
        random = random - basis.double() @ (basis.double().T @ random)
    return torch.cat([basis.double(), torch.linalg.qr(random).Q], dim=1)


def nystrom_eigh(sketch: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Leading eigenpairs ((p,), (n, p)) of a positive semi-definite M from its sketch M @ test (n, p).

    The shifted Nystrom approximation of Tropp et al. (2017), algorithm 3: exact when the rank of M is at most p.
    """
    sketch, test = sketch.double(), test.double()
    shift = torch.finfo(torch.float64).eps * torch.linalg.norm(sketch)
    shifted = sketch + shift * test
    core = test.T @ shifted
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    half = vectors * values.clamp_min(shift).rsqrt()  # core^(-1/2), whatever its rank in floating point
    left, sigma, _ = torch.linalg.svd(shifted @ half, full_matrices=False)
    return (sigma.square() - shift).clamp_min(0), fix_signs(left)


def whitening_pair(gram: Tensor, ridge: float, solver: Literal["eigh", "cholesky"] = "eigh") -> tuple[Tensor, Tensor]:
    """(S, S^-1), both (n, n), with S S^T = gram + ridge I of a positive semi-definite matrix: z = S^-1 x has the covariance I.

    "cholesky" takes a tenth of the time and goes over to "eigh" where rounding has made the matrix indefinite.
    Raises torch.linalg.LinAlgError where gram and ridge are zero.
    """
    gram = gram.double()
    if not float(gram.diagonal().sum()) + ridge > 0:
        raise torch.linalg.LinAlgError("the matrix to whiten is zero")
    eye = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    if solver == "cholesky":
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * eye)
        if not failed:
            return factor, torch.linalg.solve_triangular(factor, eye, upper=False)
    values, vectors = torch.linalg.eigh(gram)
    roots = (values.clamp_min(0) + ridge).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return vectors * roots, (vectors / roots).T


def whitening_pair_of_root(root: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """As `whitening_pair` for root^T root + ridge I, from the root (k, n), without forming the square."""
    n = root.shape[1]
    eye = torch.eye(n, dtype=torch.float64, device=root.device)
    factor = torch.linalg.qr(torch.cat([root.double(), ridge**0.5 * eye]), mode="r").R
    if not bool((factor.diagonal() != 0).all()):
        raise torch.linalg.LinAlgError("the matrix to whiten is singular")
    return factor.T, torch.linalg.solve_triangular(factor, eye, upper=True).T


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(U (m, r), sigma, V^T (r, n)) of the best approximation of rank r; sigma are all min(m, n) singular values. float64."""
    left, sigma, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left[:, :rank], sigma, right[:rank]
