"""Round a weight matrix to a few bits, column by column, each column making up for the errors of those before it (GPTQ).

For a layer W (m x n) whose inputs have the second moment H = E[x x^T] (n x n), GPTQ looks for Q on a grid with a small
||(W - Q) H^(1/2)||_F. Columns are rounded from left to right; with U the upper Cholesky factor of H^-1 (H^-1 = U^T U), the error of
column j is handed on:

    q = grid(w_j)        e = (w_j - q) / U_jj        w_{j:} <- w_{j:} - e U_{j, j:}

The grid of a row has a scale and an integer zero point for each group of columns, taken from the weights as they are when the
group is reached: q = scale (code - zero), code in 0 .. 2^bits - 1. With H = I this is rounding to nearest.

Source: Frantar et al., "GPTQ", arXiv 2210.17323, algorithm 1. Scales are rounded to float16 first, as files store them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
DAMPING = 0.01  # of the mean of H's diagonal
BLOCK = 128  # columns after which the others are brought up to date
SHRINK = torch.linspace(1.0, 0.5, 20)  # ranges that `mse_clip` tries


@dataclass(frozen=True)
class Grid:
    """How numbers are rounded. `group_size` columns share a scale; -1: all columns of a row.

    `sym`: zero in the middle of the codes. `desc_act`: columns in the order of H's diagonal, largest first (with scales from the weights
    as they were). `mse_clip`: of 20 ranges, from the whole to half of it, the one with the least squared error.
    """

    bits: int = 3
    group_size: int = 64
    sym: bool = False
    desc_act: bool = False
    mse_clip: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is one of {', '.join(map(str, BITS))}, not {self.bits}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size is a number of columns, or -1 for all, not {self.group_size}")

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def columns(self, n: int, name: str = "the layer") -> int:
        """Columns in a group of a matrix with n. Raises ValueError where groups do not fill it."""
        size = n if self.group_size == -1 else self.group_size
        if n % size:
            raise ValueError(
                f"group_size {size} does not divide the {n} inputs of '{name}'. Take a divisor, or -1 for one group a row"
            )
        return size

    def stored_bits(self, m: int, n: int) -> int:
        """Bits of an m x n matrix in a file of GPTQ's layout: codes, 16-bit scales and zero points, and 32 for the group of each input."""
        return m * n * self.bits + m * (n // self.columns(n)) * (16 + self.bits) + 32 * n

    def ranges(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero), both (m,) float32, for the numbers (m, g) of one group. Zero points are 1 or more: files in GPTQ's format store
        them minus one."""
        low, high = w.amin(1).clamp_max(0), w.amax(1).clamp_min(0)
        scale, zero = self._scale(low, high)
        if not self.mse_clip:
            return scale, zero
        best = torch.full_like(scale, torch.inf)
        for share in SHRINK.tolist():
            s, z = self._scale(share * low, share * high)
            error = (self.round(w, s[:, None], z[:, None]) - w).square().sum(1)
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
        return scale, zero

    def _scale(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.sym:
            high = torch.maximum(high, -low)
            low = -high
        scale = _as_stored((high - low) / self.top)
        if self.sym:
            return scale, torch.full_like(scale, (self.top + 1) // 2)
        zero = (-low / scale).round().clamp(0, self.top)
        positive = zero == 0
        return torch.where(positive, _as_stored(high / (self.top - 1)), scale), torch.where(positive, 1.0, zero)

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (w / scale).round().add(zero).clamp(0, self.top)

    def round(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (self.codes(w, scale, zero) - zero) * scale


def _as_stored(scale: Tensor) -> Tensor:
    """Rounded to float16, where scales are kept; 1 for a group of zeros."""
    scale = torch.where(scale > 0, scale, 1.0)
    return scale.half().float().clamp_min(2.0**-24)


@dataclass(frozen=True)
class Quantized:
    """Q = scales (codes - zeros) as codes (m, n) uint8, scales (m, G) float32 and zeros (m, G) uint8; `group_of` (n,) has each column's
    group."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int

    def dequantize(self) -> Tensor:
        """Q (m, n), float32."""
        group = self.group_of.long()
        return (self.codes.float() - self.zeros.float()[:, group]) * self.scales[:, group]


def round_to_nearest(W: Tensor, grid: Grid) -> Quantized:
    """Each number to the nearest of its grid, the grid from W itself."""
    return gptq(W, None, replace(grid, desc_act=False))


@torch.no_grad()
def gptq(W: Tensor, H: Tensor | None, grid: Grid, damping: float = DAMPING) -> Quantized:
    """Round W (m, n) for inputs with the second moment H (n, n); None: H = I. Inputs that are always zero get weight zero.

    `damping` times the mean of H's diagonal is added to it. Raises ValueError where groups do not fill a row.
    """
    m, n = W.shape
    size = grid.columns(n)
    columns = W.detach().float().T.contiguous()  # (n, m): a column of W is a row here
    order = torch.arange(n, device=W.device)
    U = None
    if H is not None:
        H = H.to(W.device).double()
        dead = H.diagonal() == 0
        columns[dead] = 0
        if grid.desc_act:
            order = H.diagonal().argsort(descending=True, stable=True)
        U = inverse_root(H[order][:, order], damping).float()
    group_of = torch.arange(n, device=W.device) // size
    scales, zeros = columns.new_zeros(n // size, m), columns.new_zeros(n // size, m)
    if grid.desc_act:
        for group in range(n // size):
            scales[group], zeros[group] = grid.ranges(columns[group * size : (group + 1) * size].T)
    columns = columns[order]
    codes = torch.empty_like(columns)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        errors = columns.new_zeros(stop - start, m)
        for j in range(start, stop):
            group = int(group_of[order[j]]) if grid.desc_act else j // size
            if not grid.desc_act and j % size == 0:
                # the rest of the group may lie beyond this block, which has not been brought up to date yet
                if U is not None and j + size > stop and j > start:
                    ahead = columns[stop : j + size] - U[start:j, stop : j + size].T @ errors[: j - start]
                    scales[group], zeros[group] = grid.ranges(torch.cat([columns[j:stop], ahead]).T)
                else:
                    scales[group], zeros[group] = grid.ranges(columns[j : j + size].T)
            w, scale, zero = columns[j], scales[group], zeros[group]
            codes[j] = grid.codes(w, scale, zero)
            if U is not None:
                error = torch.sub(w, (codes[j] - zero).mul_(scale)).div_(U[j, j])
                errors[j - start] = error
                columns[j + 1 : stop].addr_(U[j, j + 1 : stop], error, alpha=-1)
        if U is not None and stop < n:
            columns[stop:] -= U[start:stop, stop:].T @ errors
    back = torch.empty_like(order)
    back[order] = torch.arange(n, device=W.device)
    return Quantized(
        codes[back].T.to(torch.uint8).contiguous(),
        scales.T.contiguous(),
        zeros.T.to(torch.uint8).contiguous(),
        group_of.to(torch.int32),
        grid.bits,
    )


def inverse_root(H: Tensor, damping: float = DAMPING) -> Tensor:
    """U (n, n), upper triangular with U^T U = (H + damping mean(diag H) I)^-1, float64.

    Zeros on the diagonal count as ones. Where the matrix is not positive definite in floating point the damping grows tenfold, up to
    five times; after that eigenvalues are floored.
    """
    H = H.double()
    n = len(H)
    diagonal = H.diagonal()
    eye = torch.eye(n, dtype=torch.float64, device=H.device)
    mean = float(diagonal.mean())
    H = H + torch.diag((diagonal == 0).double())
    for power in range(6):
        # with J the reversal of rows, J H J = L L^T gives H = R R^T with R = J L J upper triangular, and U = R^-1
        factor, failed = torch.linalg.cholesky_ex(
            (H + max(damping, 1e-8 if power else 0.0) * 10**power * mean * eye).flip(0, 1)
        )
        if not failed:
            return torch.linalg.solve_triangular(factor.flip(0, 1), eye, upper=True)
    values, vectors = torch.linalg.eigh(H)
    root = (vectors / values.clamp_min(1e-6 * values.abs().max()).sqrt()).T  # root^T root = H^-1
    upper = torch.linalg.qr(root, mode="r").R
    return upper * torch.sign(upper.diagonal())[:, None]
