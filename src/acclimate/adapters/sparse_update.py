"""Apply F_out^T S F_in, with a sparse S at fixed positions, to many vectors at once, and its gradient, without dense matrices.

    forward    u = F_in x,  v = S u,  y = F_out^T v
    backward   h = F_out g,  ds = sum_t h[t, row] u[t, col],  dx = F_in^T S^T h

Only the distinct rows and columns of S take part, and of the forward pass only u at those columns is kept. For a square frame,
F x is an FFT or a product with one small Fourier block; else the needed rows of F are a (sparse) matrix. Between the two,
vectors are stored as columns, (rows of S, T), so that the sparse products read memory in order.

Multiplications per vector: about d log k for an FFT, 2 k d for block products, n for S.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from acclimate.adapters.tight_frames import Basis, frame_rows

Transform = Literal["auto", "fft", "gemm", "timed"]
CHUNK = 128  # vectors taken through all steps at once on a CPU, so that what lies between the steps stays in its cache
SPARSE_DEVICES = ("cpu", "cuda")  # where torch has kernels for CSR matrices; elsewhere rows are gathered and added

with warnings.catch_warnings():
    # The first CSR tensor of a process warns that this layout is in beta, which is no news for who trains an adapter.
    warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)
    _index = torch.zeros(1, dtype=torch.int32)
    torch.sparse_csr_tensor(_index, _index[:0], torch.zeros(0), (0, 0), check_invariants=False)


@torch.library.custom_op("acclimate::csr_mm", mutates_args=())
def _csr_mm(crow: Tensor, col: Tensor, values: Tensor, rows: int, dense: Tensor) -> Tensor:
    """Sparse (rows, m) times dense (m, T), opaque to torch.compile, whose tracing does not know sparse tensors."""
    if dense.device.type not in SPARSE_DEVICES:
        row = torch.repeat_interleave(crow.diff())
        return dense.new_zeros(rows, dense.shape[1]).index_add_(0, row, dense[col] * values[:, None])
    matrix = torch.sparse_csr_tensor(crow, col, values, (rows, dense.shape[0]), check_invariants=False)
    return (matrix @ dense).contiguous()


@_csr_mm.register_fake
def _(crow: Tensor, col: Tensor, values: Tensor, rows: int, dense: Tensor) -> Tensor:
    return dense.new_empty(rows, dense.shape[1])


@torch.library.custom_op("acclimate::csr_dot", mutates_args=())
def _csr_dot(crow: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left (p, T) times right (q, T) transposed, only at the positions of a sparse (p, q) pattern: its values, in order."""
    if left.device.type not in SPARSE_DEVICES:
        return (left[torch.repeat_interleave(crow.diff())] * right[col]).sum(1)
    pattern = torch.sparse_csr_tensor(
        crow, col, left.new_zeros(len(col)), (left.shape[0], right.shape[0]), check_invariants=False
    )
    # clone: the values are a view into the sparse result
    return torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0).values().clone()


@_csr_dot.register_fake
def _(crow: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(len(col))


class _Csr:
    """A fixed sparsity pattern (rows, columns) with its transposed one; values come with each product."""

    def __init__(self, row: np.ndarray, col: np.ndarray, shape: tuple[int, int], device: torch.device) -> None:
        def pattern(major: np.ndarray, minor: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
            crow = np.concatenate([[0], np.bincount(major, minlength=size).cumsum()])
            return tuple(torch.tensor(a, dtype=torch.int32, device=device) for a in (crow, minor))  # type: ignore[return-value]

        order = np.lexsort((row, col))
        self.shape = shape
        self.crow, self.col = pattern(row, col, shape[0])
        self.crow_t, self.row_t = pattern(col[order], row[order], shape[1])
        self.order = torch.tensor(order, device=device)

    def mm(self, values: Tensor, dense: Tensor) -> Tensor:
        return _csr_mm(self.crow, self.col, values, self.shape[0], dense)

    def t_mm(self, values: Tensor, dense: Tensor) -> Tensor:
        return _csr_mm(self.crow_t, self.row_t, values[self.order], self.shape[1], dense)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        return _csr_dot(self.crow, self.col, left, right)


class _FourierRows:
    """Chosen rows of a square frame: the whole transform, then a selection.

    The transform gives row q l + 2 i + c of F in the order (i, q, c), so `index` points there and nothing is permuted.
    """

    def __init__(self, basis: Basis, rows: np.ndarray, dtype: torch.dtype, device: torch.device, method: str) -> None:
        q, i, part = rows // basis.ell, rows % basis.ell // 2, rows % 2
        self.n, self.k, self.method = basis.n, basis.k, method
        self.index = torch.tensor(i * 2 * basis.k + 2 * q + part, dtype=torch.int64, device=device)
        self.block = _fourier_block(basis.k, dtype, device) if method == "gemm" else None

    def apply(self, x: Tensor) -> Tensor:
        """(T, n) -> (m, T)"""
        if self.block is not None:
            u = (x.reshape(-1, 2 * self.k) @ self.block.t()).view(-1, self.n)
        else:
            u = self._fft(x, torch.fft.ifft)
        return u.t().index_select(0, self.index)

    def adjoint(self, v: Tensor) -> Tensor:
        """(m, T) -> (T, n)"""
        u = v.new_zeros(v.shape[1], self.n).index_copy_(1, self.index, v.t())
        if self.block is not None:
            return (u.view(-1, 2 * self.k) @ self.block).view(-1, self.n)
        return self._fft(u, torch.fft.fft)

    def _fft(self, x: Tensor, transform: Any) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, self.n // (2 * self.k), self.k, 2))
        return torch.view_as_real(transform(z, norm="ortho")).reshape(-1, self.n)


class _MatrixRows:
    """Chosen rows of any basis as a matrix A (m, n): dense, or sparse where less than an eighth of it is not zero."""

    def __init__(self, basis: Basis, rows: np.ndarray, dtype: torch.dtype, device: torch.device) -> None:
        matrix = basis.rows(rows).tocoo()
        self.values = torch.tensor(matrix.data, dtype=dtype, device=device)
        self.csr = (
            _Csr(matrix.row, matrix.col, matrix.shape, device) if 8 * matrix.nnz < math.prod(matrix.shape) else None
        )
        if self.csr is None:
            self.values = torch.tensor(matrix.toarray(), dtype=dtype, device=device)

    def apply(self, x: Tensor) -> Tensor:
        return self.values @ x.t() if self.csr is None else self.csr.mm(self.values, x.t())

    def adjoint(self, v: Tensor) -> Tensor:
        return v.t() @ self.values if self.csr is None else self.csr.t_mm(self.values, v).t()


@lru_cache(maxsize=32)
def _fourier_block(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(frame_rows(k, 2, 2 * k).toarray(), dtype=dtype, device=device)


def pick_transform(k: int, device: torch.device) -> Literal["fft", "gemm"]:
    """The fixed rule of `transform="auto"`, from timings at widths 32 to 11008.

    On CPUs the FFT is 1.3 to 20 times faster where k >= 12 has only small prime factors; for others the block product is, up to
    its quadratic cost. On accelerators a block of up to 128 x 128 is one tile of a matrix unit.
    """
    if device.type != "cpu":
        return "gemm" if k <= 64 else "fft"
    rest = k
    for prime in (2, 3, 5, 7, 11, 13):
        while rest % prime == 0:
            rest //= prime
    return "fft" if k > 96 or (k >= 12 and rest == 1) else "gemm"


@lru_cache(maxsize=64)
def _timed_transform(k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    basis, x = Basis("frame", n, k, n // k), torch.ones(256, n, dtype=dtype, device=device)

    def seconds(method: str) -> float:
        rows = _FourierRows(basis, np.arange(2), dtype, device, method)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            rows.apply(x).sum().item()  # item() waits for the device
            times.append(time.perf_counter() - start)
        return min(times)

    return min(("fft", "gemm"), key=seconds)


def _rows_of(basis: Basis, rows: np.ndarray, dtype: torch.dtype, device: torch.device, transform: Transform) -> Any:
    # a few rows cost less as a matrix than the whole transform does
    if not basis.is_fourier or len(rows) <= basis.k:
        return _MatrixRows(basis, rows, dtype, device)
    method: str = transform
    if transform == "auto":
        method = pick_transform(basis.k, device)
    elif transform == "timed":
        method = _timed_transform(basis.k, basis.n, dtype, device)
    return _FourierRows(basis, rows, dtype, device, method)


class SparseUpdate:
    """F_out^T S F_in for given positions of S, on one device and in one dtype; shared by all layers that agree on these.

    `positions` is (2, n), rows and columns of S, as `draw_positions` gives them. Raises ValueError for others.
    """

    def __init__(
        self,
        positions: np.ndarray,
        bases: tuple[Basis, Basis],
        dtype: torch.dtype,
        device: torch.device,
        transform: Transform = "auto",
    ) -> None:
        height, width = bases[0].count, bases[1].count
        flat = positions[0].astype(np.int64) * width + positions[1]
        inside = (positions >= 0).all() and (positions[0] < height).all() and (positions[1] < width).all()
        if not inside or (np.diff(flat) <= 0).any():  # the sparse products trust their indices
            raise ValueError(f"positions must be distinct, sorted by row, and inside a grid of {height} x {width}")
        (rows, row), (columns, col) = (np.unique(side, return_inverse=True) for side in positions)
        self.dtype, self.device = dtype, device
        self.support = _Csr(row, col, (len(rows), len(columns)), device)
        self.out = _rows_of(bases[0], rows, dtype, device, transform)
        self.into = _rows_of(bases[1], columns, dtype, device, transform)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseUpdate:
        return self  # nothing in it changes

    def dense(self, s: Tensor) -> Tensor:
        """F_out^T S F_in as a matrix (d_out, d_in)."""
        a, b = self.factors(s)
        return a @ b

    def factors(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """(d_out, p) and (p, d_in) whose product it is, p = min(distinct rows, distinct columns)."""
        rows, columns = self.support.shape
        eye = partial(torch.eye, dtype=self.dtype, device=self.device)
        if rows < columns:
            return self.out.adjoint(eye(rows)).t(), self.support.mm(s, self.into.adjoint(eye(columns)))
        inner = self.into.adjoint(eye(columns))
        return self.out.adjoint(self.support.mm(s, eye(columns))).t(), inner

    def __call__(self, x: Tensor, s: Tensor, recompute: bool = False) -> Tensor:
        """x (..., d_in) and coefficients s (n,) -> (..., d_out), differentiable in both."""
        y = _Apply.apply(x.reshape(-1, x.shape[-1]), s, self, recompute)
        return y.view(*x.shape[:-1], y.shape[-1])


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, update: SparseUpdate, recompute: bool) -> Tensor:
        size = CHUNK if x.device.type == "cpu" and not torch.compiler.is_compiling() else max(1, len(x))
        kept = []

        def change(part: Tensor) -> Tensor:
            u = update.into.apply(part)
            kept.append(part if recompute else u)
            return update.out.adjoint(update.support.mm(s, u))

        with torch.autocast(x.device.type, enabled=False):
            y = _by_chunks(change, x, size)
        ctx.save_for_backward(s, *kept)
        ctx.update, ctx.recompute, ctx.size = update, recompute, size
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        update: SparseUpdate = ctx.update
        s, *kept = ctx.saved_tensors
        wants_x, wants_s = ctx.needs_input_grad[:2]
        parts = iter(kept)
        ds = torch.zeros_like(s) if wants_s else None

        def pull_back(part: Tensor) -> Tensor:
            nonlocal ds
            h, u = update.out.apply(part), next(parts)
            if ds is not None:
                ds = ds + update.support.dot(h, update.into.apply(u) if ctx.recompute else u)
            return update.into.adjoint(update.support.t_mm(s, h)) if wants_x else part[:, :0]

        with torch.autocast(g.device.type, enabled=False):
            dx = _by_chunks(pull_back, g, ctx.size)
        return dx if wants_x else None, ds, None, None


def _by_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """`function` of rows (T, n), `size` at a time; its results (t, m) one below the other."""
    first = function(rows[:size])
    if len(rows) <= size:
        return first
    result = first.new_empty(len(rows), first.shape[1])
    result[:size] = first
    for start in range(size, len(rows), size):
        result[start : start + size] = function(rows[start : start + size])
    return result


_UPDATES: WeakValueDictionary[tuple, SparseUpdate] = WeakValueDictionary()


@torch.compiler.disable
def shared_update(
    positions: Tensor, bases: tuple[Basis, Basis], dtype: torch.dtype, device: torch.device, transform: Transform
) -> SparseUpdate:
    where = positions.cpu().numpy()
    key = (hashlib.sha256(where.tobytes()).digest(), bases, dtype, str(device), transform)
    found = _UPDATES.get(key)
    if found is None:
        found = _UPDATES[key] = SparseUpdate(where, bases, dtype, device, transform)
    return found
