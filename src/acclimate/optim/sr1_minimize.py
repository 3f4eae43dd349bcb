"""L-SR1 for functions of NumPy arrays, with SciPy's interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import OptimizeResult, approx_fprime
from torch import nn

from acclimate.optim.learned_sr1 import LSR1, Guard
from acclimate.optim.sr1_policy import LSR1Policy

Array = np.ndarray[Any, np.dtype[np.float64]]


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    policy: str | Path | LSR1Policy = "generic",
    jac: Callable[..., Any] | bool | None = None,
    maxiter: int = 50,
    gtol: float = 1e-6,
    *,
    args: tuple[Any, ...] = (),
    callback: Callable[[Array], Any] | None = None,
    guard: Guard = "armijo",
    buffer: int = 4,
    first_step: float = 0.5,
) -> OptimizeResult:
    """Minimise `fun(x, *args)` from `x0`, in float64.

    `jac` is a function, True where `fun` returns (value, gradient), or None for finite differences. It ends when no component of the
    gradient is above `gtol` (status 0), after `maxiter` steps (1), or when a value is not finite (2). The result is the best point seen, with
    SciPy's fields; `stats` is the optimiser's. `callback(x)` after each step may raise StopIteration (3). A step too short to change x ends it (4).
    """
    start = np.asarray(x0, dtype=float)
    x = nn.Parameter(torch.from_numpy(start.ravel().copy()))
    optimizer = LSR1([x], policy=policy, guard=guard, buffer=buffer, first_step=first_step)
    counts = {"nfev": 0, "njev": 0}
    seen: dict[bytes, tuple[float, Array]] = {}  # the last point: an accepted trial is not evaluated again

    def evaluate(point: Array) -> tuple[float, Array]:
        key = point.tobytes()
        if key not in seen:
            at = point.reshape(start.shape)
            counts["nfev"] += 1
            counts["njev"] += 1
            if jac is True:
                value, slope = fun(at, *args)
            elif callable(jac):
                value, slope = fun(at, *args), jac(at, *args)
            else:
                value = fun(at, *args)
                slope = approx_fprime(point, lambda z: float(fun(z.reshape(start.shape), *args)))
                counts["nfev"] += len(point) + 1
            seen.clear()
            seen[key] = float(value), np.asarray(slope, dtype=float).ravel()
        return seen[key]

    def closure() -> torch.Tensor:
        value, slope = evaluate(x.detach().numpy().copy())
        x.grad = torch.from_numpy(slope.copy())
        return torch.tensor(value, dtype=torch.float64)

    best = (np.inf, start.ravel().copy(), np.full(start.size, np.nan))
    status, steps = 1, 0
    messages = (
        "the gradient is small",
        "the maximum number of steps",
        "a value is not finite",
        "the callback stopped it",
        "steps have become too short to change x",
    )
    while True:
        point = x.detach().numpy().copy()
        value, slope = evaluate(point)
        if not (np.isfinite(value) and np.isfinite(slope).all()):
            status = 2
            break
        if value < best[0]:
            best = (value, point, slope)
        if np.abs(slope).max() <= gtol:
            status, best = 0, (value, point, slope)
            break
        if steps == maxiter:
            break
        optimizer.step(closure)
        steps += 1
        if np.array_equal(x.detach().numpy(), point):
            status = 4
            break
        if callback is not None:
            try:
                callback(x.detach().numpy().reshape(start.shape).copy())
            except StopIteration:
                status = 3
                break
    value, point, slope = best
    return OptimizeResult(
        x=point.reshape(start.shape), fun=value, jac=slope, nit=steps, status=status, success=status == 0, message=messages[status],
        stats=optimizer.stats, **counts,
    )  # fmt: skip


def lsr1_method(fun: Callable[..., Any], x0: Any, **options: Any) -> OptimizeResult:
    """For `scipy.optimize.minimize(fun, x0, method=lsr1_method, options=...)`: `minimize` above; bounds, constraints: ValueError."""
    for name in ("bounds", "constraints"):
        if options.pop(name, None):
            raise ValueError(f"lsr1_method minimises without {name}")
    for name in ("hess", "hessp"):
        options.pop(name, None)
    tolerance = options.pop("tol", None)
    if tolerance is not None:
        options.setdefault("gtol", tolerance)
    return minimize(fun, x0, **options)
