"""Tight fusion frames: bases for matrices, generated from three integers, and the positions of coefficients in them.

A frame (k, l, n) is a matrix F in R^{N x n}, N = k l, with F^T F = I: k subspaces, each with an orthogonal basis of l rows of
equal norm (l is `ell` in the code). n and l are even and 2 l <= n, since F is the real form of a complex frame with l' = l/2 and n' = n/2:

1. Spectral Tetris seed M (l' x n', real): rows of squared norm n'/l', unit columns, orthogonal rows. Row by row, place ones
   while the missing squared norm is at least 1; where a fraction x is missing, put [[a, a], [b, -b]], a^2 = x/2,
   b^2 = 1 - x/2, on two rows and two columns, and go on.
2. Modulate: M_q = M diag(e^{2 pi i q j / k}) / sqrt(k), q = 0..k-1, over the columns j.
3. Real form: a complex entry a + ib becomes [[a, -b], [b, a]]. Row q l + 2 i + c of F is row i of M_q, part c.

Where l divides n and k = n/l, M is a staircase of ones, F is square and orthogonal, and it is l/2 equal Fourier blocks of size k:
F x is an inverse FFT of x read as l/2 vectors of k complex numbers, F^T u a forward one.

Source: Casazza, Fickus, Mixon, Wang, Zhou (2011), "Constructing tight fusion frames"; used for networks in FrameQuant
(arXiv 2403.06082) and "Fine-Tuning of Transformer models with Frames" (ICML 2026).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import sparse

BasisName = Literal["frame", "random", "identity"]
SupportName = Literal["random", "block", "compact"]

_TOLERANCE = 1e-9
PUBLISHED_BLOCKS = 128  # of the published instruction tuning of Llama-2-7B


# --- which frames exist ---


def auto_l(n: int) -> int:
    """The even divisor of `n` nearest to sqrt(n), at most n/2; the lower one on a tie. Density of F is then about 2/sqrt(n).

    Raises ValueError when `n` is odd or below 4: there is no frame.
    """
    _check_n(n)
    divisors = [ell for ell in range(2, n // 2 + 1, 2) if n % ell == 0]
    return min(divisors, key=lambda ell: (abs(ell - math.sqrt(n)), ell))


def frame_exists(k: int, ell: int, n: int) -> bool:
    """Whether this construction gives a tight frame (k, l, n), for even n and l with 2 l <= n.

    If l divides n: k >= n/l. Else k >= ceil(n/l) + 2 always works, k = ceil(n/l) + 1 sometimes (the seed is built and
    looked at; some such frames exist but need a construction that is left out here), and smaller k never do.
    """
    least = -(-n // ell)
    if n % ell == 0:
        return k >= least
    if k != least + 1:
        return k >= least + 2
    # F^T F = I just when columns of the seed whose numbers are equal modulo k are orthogonal
    seed = spectral_tetris(ell // 2, n // 2)
    gram = (seed.T @ seed).tocoo()
    clash = (gram.row != gram.col) & ((gram.row - gram.col) % k == 0) & (np.abs(gram.data) > _TOLERANCE)
    return not clash.any()


def check_frame(k: int, ell: int, n: int) -> None:
    """Raises ValueError that names valid values when there is no tight frame (k, l, n)."""
    _check_n(n)
    largest = n // 4 * 2
    if ell % 2 or not 2 <= ell <= largest:
        raise ValueError(f"frame_l must be even and from 2 to {largest} for dimension {n}, got {ell}")
    if frame_exists(k, ell, n):
        return
    least = next(count for count in range(-(-n // ell), n) if frame_exists(count, ell, n))
    others = [other for other in range(2, largest + 1, 2) if frame_exists(k, other, n)]
    hint = f", or l={min(others, key=lambda other: abs(other - ell))} with k={k}" if others else ""
    raise ValueError(
        f"there is no tight frame of k={k} subspaces of l={ell} dimensions in dimension n={n}. Nearest that exist: "
        f"k={least} with l={ell} (redundancy {least * ell / n:.4g}){hint}"
    )


def _check_n(n: int) -> None:
    if n % 2 or n < 4:
        raise ValueError(
            f"a frame needs an even dimension of at least 4, got {n}; exclude such layers (exclude_modules)"
        )


# --- the frame ---


@lru_cache(maxsize=64)
def spectral_tetris(rows: int, columns: int) -> sparse.csr_array:
    """The seed M, (rows, columns), columns >= 2 rows: orthogonal rows of squared norm columns/rows, unit columns."""
    norm = columns / rows
    i_of, j_of, values = [], [], []
    missing, j = norm, 0

    def put(i: int, j: int, value: float) -> None:
        i_of.append(i)
        j_of.append(j)
        values.append(value)

    for i in range(rows):
        while missing >= 1 - _TOLERANCE:
            put(i, j, 1.0)
            missing -= 1
            j += 1
        spent = 0.0
        if missing > _TOLERANCE:
            a, b = math.sqrt(missing / 2), math.sqrt(1 - missing / 2)
            put(i, j, a)
            put(i, j + 1, a)
            put(i + 1, j, b)
            put(i + 1, j + 1, -b)
            spent = 2 - missing
            j += 2
        missing = norm - spent
    return sparse.csr_array((values, (i_of, j_of)), shape=(rows, columns))


def frame_rows(k: int, ell: int, n: int, rows: np.ndarray | None = None) -> sparse.csr_array:
    """Rows of the frame F (all k*l of them when `rows` is None), as a sparse (len(rows), n) matrix in float64.

    The frame is not checked: `check_frame` does that.
    """
    rows = np.arange(k * ell) if rows is None else np.asarray(rows, dtype=np.int64)
    q, i, part = rows // ell, rows % ell // 2, rows % 2
    seed = spectral_tetris(ell // 2, n // 2)
    counts = np.diff(seed.indptr)[i]
    owner = np.repeat(np.arange(len(rows)), counts)
    entry = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + seed.indptr[i[owner]]
    j = seed.indices[entry].astype(np.int64)
    # q j modulo k keeps the angle exact for large frames
    angle = 2 * np.pi * (q[owner] * j % k) / k
    a, b = (seed.data[entry] * f(angle) / math.sqrt(k) for f in (np.cos, np.sin))
    first = part[owner] == 0
    values = np.stack([np.where(first, a, b), np.where(first, -b, a)], axis=1).ravel()
    columns = np.stack([2 * j, 2 * j + 1], axis=1).ravel()
    return sparse.csr_array((values, (np.repeat(owner, 2), columns)), shape=(len(rows), n))


# --- bases by name ---


@dataclass(frozen=True)
class Basis:
    """A basis of R^n: `count` vectors, the rows of F with F^T F = I. Generated on demand, never stored."""

    name: BasisName
    n: int
    k: int = 0
    ell: int = 0
    seed: int = 0

    @classmethod
    def of(cls, name: BasisName, n: int, frame_l: int | Literal["auto"], redundancy: float, seed: int) -> Basis:
        """The basis of one side of a layer. Raises ValueError when there is none, with values that work."""
        if name == "identity":
            return cls(name, n)
        if name == "random":
            return cls(name, n, seed=seed ^ zlib.crc32(f"basis {n}".encode()))
        ell = auto_l(n) if frame_l == "auto" else frame_l
        k = max(1, round(redundancy * n / ell)) if ell > 0 else 0
        check_frame(k, ell, n)
        return cls(name, n, k, ell)

    @property
    def count(self) -> int:
        """N, the number of rows of F."""
        return self.k * self.ell if self.name == "frame" else self.n

    @property
    def is_fourier(self) -> bool:
        """Whether F is l/2 Fourier blocks of size k, in another order."""
        return self.name == "frame" and self.k * self.ell == self.n

    def rows(self, rows: np.ndarray) -> sparse.csr_array:
        """Rows of F, (len(rows), n), in float64."""
        if self.name == "frame":
            return frame_rows(self.k, self.ell, self.n, rows)
        if self.name == "random":
            return sparse.csr_array(haar(self.n, self.seed)[rows])
        ones = np.ones(len(rows))
        return sparse.csr_array((ones, (np.arange(len(rows)), rows)), shape=(len(rows), self.n))


@lru_cache(maxsize=4)
def haar(n: int, seed: int) -> np.ndarray:
    """A Haar-distributed orthogonal (n, n) matrix: QR of a seeded Gaussian, with the signs of R's diagonal made positive."""
    q, r = np.linalg.qr(np.random.Generator(np.random.PCG64(seed)).standard_normal((n, n)))
    return q * np.sign(np.diag(r))


# --- where the coefficients are ---


def draw_positions(
    support: SupportName, shape: tuple[int, int], count: int, seed: int, num_blocks: int | None = None, salt: str = ""
) -> np.ndarray:
    """Distinct positions in an (N_out, N_in) grid: int32 (2, n), rows and columns, sorted by row, then column.

    "random": uniform over the grid. "block": uniform inside `num_blocks` diagonal blocks; None takes the largest common divisor
    of both sides, up to 128, whose blocks hold `count`. "compact": a full p x p sub-grid, p = floor(sqrt(count)), on p random
    rows and columns, so n = p^2. `salt` (a module's name) makes layers of one shape differ.

    Raises ValueError when the grid or the blocks are too small, or `num_blocks` does not divide both sides.
    """
    out, into = shape
    generator = np.random.Generator(np.random.PCG64(seed ^ zlib.crc32(f"{out}x{into}{salt}".encode())))
    if support == "compact":
        p = math.isqrt(count)
        if p > min(shape):
            raise ValueError(
                f"n_coefficients={count} needs a {p} x {p} grid, but the layer has {out} x {into} positions; "
                f"at most {min(shape) ** 2} fit with support='compact'"
            )
        row, column = (np.sort(generator.choice(side, p, replace=False)) for side in shape)
        return np.stack([np.repeat(row, p), np.tile(column, p)]).astype(np.int32)
    blocks = 1 if support == "random" else num_blocks or _auto_blocks(shape, count)
    if out % blocks or into % blocks:
        divisors = [b for b in range(1, math.gcd(out, into) + 1) if math.gcd(out, into) % b == 0]
        raise ValueError(
            f"num_blocks={blocks} does not divide a layer of {out} x {into} positions; these do: "
            f"{', '.join(map(str, divisors))}"
        )
    height, width = out // blocks, into // blocks
    if count > blocks * height * width:
        where = f"{blocks} blocks of {height} x {width}" if support == "block" else f"a layer of {out} x {into}"
        raise ValueError(f"n_coefficients={count} does not fit in {where}: at most {blocks * height * width}")
    # choice() without replacement needs memory for the sample only, unless the sample is a large part of the whole
    flat = np.sort(generator.choice(blocks * height * width, count, replace=False, shuffle=False))
    row, inside = flat // width, flat % width
    return np.stack([row, row // height * width + inside]).astype(np.int32)


def _auto_blocks(shape: tuple[int, int], count: int) -> int:
    common, area = math.gcd(*shape), shape[0] * shape[1]
    fitting = [b for b in range(1, PUBLISHED_BLOCKS + 1) if common % b == 0 and area // b >= count]
    return max(fitting, default=1)
