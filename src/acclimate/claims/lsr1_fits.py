"""Part C of the claim `lsr1`: the 27 nonlinear regressions of NIST's Statistical Reference Datasets (`samples/nist_strd`).

Of each, f(z) = S(b) / S(b_0) with the sum of squared residuals S, b = b_0 z and b_0 NIST's second start, so that z starts at ones; float64. A solver has
finished when it evaluates a point with S <= (1 + 1e-6) times NIST's certified minimum. An evaluation is f with its gradient. Models are those in
the headers of NIST's files.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from acclimate.claims.base import Row
from acclimate.optim.sr1_minimize import minimize
from acclimate.optim.sr1_policy import LSR1Policy

DATA = Path(__file__).parents[1] / "samples" / "nist_strd" / "fits.json.gz"
Array = np.ndarray[Any, np.dtype[np.float64]]
Model = Callable[..., Tensor]  # (b, x) to what y should be
TOLERANCE = 1e-6
BUDGETS = (50, 200, 1000)


def cubic_ratio(b: Tensor, x: Tensor) -> Tensor:
    return (b[0] + x * (b[1] + x * (b[2] + x * b[3]))) / (1 + x * (b[4] + x * (b[5] + x * b[6])))


def exponentials(b: Tensor, x: Tensor) -> Tensor:
    return sum((b[i] * (-b[i + 1] * x).exp() for i in (0, 2, 4)), torch.zeros_like(x))


def gaussians(b: Tensor, x: Tensor) -> Tensor:
    peaks = (b[i] * (-((x - b[i + 1]) ** 2) / b[i + 2] ** 2).exp() for i in (2, 5))
    return sum(peaks, b[0] * (-b[1] * x).exp())


def seasons(b: Tensor, x: Tensor) -> Tensor:
    turn = 2 * math.pi * x
    year = b[1] * (turn / 12).cos() + b[2] * (turn / 12).sin()
    return b[0] + year + sum(b[i + 1] * (turn / b[i]).cos() + b[i + 2] * (turn / b[i]).sin() for i in (3, 6))


def decay_over_line(b: Tensor, x: Tensor) -> Tensor:
    return (-b[0] * x).exp() / (b[1] + b[2] * x)


def saturation(b: Tensor, x: Tensor) -> Tensor:
    return b[0] * (1 - (-b[1] * x).exp())


MODELS: dict[str, Model] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": saturation,
    "Chwirut1": decay_over_line,
    "Chwirut2": decay_over_line,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": seasons,
    "Eckerle4": lambda b, x: b[0] / b[1] * (-0.5 * ((x - b[2]) / b[1]) ** 2).exp(),
    "Gauss1": gaussians,
    "Gauss2": gaussians,
    "Gauss3": gaussians,
    "Hahn1": cubic_ratio,
    "Kirby2": lambda b, x: (b[0] + x * (b[1] + x * b[2])) / (1 + x * (b[3] + x * b[4])),
    "Lanczos1": exponentials,
    "Lanczos2": exponentials,
    "Lanczos3": exponentials,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * (b[1] / (x + b[2])).exp(),
    "MGH17": lambda b, x: b[0] + b[1] * (-x * b[3]).exp() + b[2] * (-x * b[4]).exp(),
    "Misra1a": saturation,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x, x2: b[0] - b[1] * x * (-b[2] * x2).exp(),  # of log y
    "Rat42": lambda b, x: b[0] / (1 + (b[1] - b[2] * x).exp()),
    "Rat43": lambda b, x: b[0] / (1 + (b[1] - b[2] * x).exp()) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - (b[2] / (x - b[3])).atan() / math.pi,
    "Thurber": cubic_ratio,
}


@dataclass(frozen=True)
class Fit:
    """One regression."""

    name: str
    start: Tensor
    certified: Tensor
    sum_of_squares: float  # certified
    y: Tensor
    x: tuple[Tensor, ...]

    def squares(self, b: Tensor) -> Tensor:
        """S of parameters b (k,)."""
        return (self.y - MODELS[self.name](b, *self.x)).square().sum()


@functools.lru_cache
def fits() -> tuple[Fit, ...]:
    found = []
    for name, content in json.loads(gzip.decompress(DATA.read_bytes())).items():
        y, *x = torch.tensor(content["rows"], dtype=torch.float64).T
        start, certified = (torch.tensor(b, dtype=torch.float64) for b in (content["starts"][1], content["certified"]))
        found.append(
            Fit(name, start, certified, content["sum_of_squares"], y.log() if name == "Nelson" else y, tuple(x))
        )
    return tuple(found)


class _EndError(Exception):
    pass


Solver = Callable[[Callable[[Array], tuple[float, Array]], Array], Any]

SOLVERS: dict[str, Solver] = {
    "SciPy BFGS": lambda f, z: scipy.optimize.minimize(
        f, z, jac=True, method="BFGS", options={"gtol": 0, "maxiter": 10**6}
    ),
    "SciPy L-BFGS-B": lambda f, z: scipy.optimize.minimize(
        f, z, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 0, "maxfun": 10**6, "maxiter": 10**6}
    ),
}


def solvers() -> dict[str, Solver]:
    """SciPy's and ours, by name; all go on until they can do no more."""

    def ours(policy: str | LSR1Policy) -> Solver:
        return lambda f, z: minimize(f, z, policy=policy, jac=True, gtol=0, maxiter=10**6)

    return {"L-SR1": ours(LSR1Policy.from_pretrained("generic")), "SR1": ours("sr1"), **SOLVERS}


def evaluations(solve: Solver, fit: Fit, most: int) -> tuple[int | None, float]:
    """After how many evaluations a point is good enough (None: not within `most`), and the least S over the certified one, less 1."""
    scale = float(fit.squares(fit.start))
    best, count = math.inf, 0

    def f(z: Array) -> tuple[float, Array]:
        nonlocal best, count
        if count == most:
            raise _EndError
        count += 1
        at = torch.from_numpy(np.array(z)).requires_grad_()
        value = fit.squares(fit.start * at)
        (slope,) = torch.autograd.grad(value, at)
        if float(value) < best:
            best = float(value)
            if best <= (1 + TOLERANCE) * fit.sum_of_squares:
                raise _EndError
        return float(value) / scale, (slope / scale).numpy()

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of steps to where a model is not defined
        with contextlib.suppress(_EndError):
            solve(f, np.ones(len(fit.start)))
    excess = best / fit.sum_of_squares - 1
    return (count if excess <= TOLERANCE else None), excess


def regressions(names: Sequence[str] | None, most: int, report: Callable[[str], None]) -> list[Row]:
    """Rows of part C, on all data sets or the named; "seeds" are the data sets."""
    chosen = [fit for fit in fits() if names is None or fit.name in names]
    rows = []
    for system, solve in solvers().items():
        found = {fit.name: evaluations(solve, fit, most) for fit in chosen}
        counts = {name: count for name, (count, _) in found.items()}
        for budget in BUDGETS:
            if budget <= most:
                solved = [float(count is not None and count <= budget) for count in counts.values()]
                metric = f"share of NIST's regressions solved within {budget} evaluations"
                rows.append(Row.from_values(system, metric, solved, list(range(len(chosen)))))
        rows[-1].extra.update(
            evaluations=counts, excess={name: excess for name, (count, excess) in found.items() if count is None}
        )
        report(f"C, {system}: " + ", ".join(f"{name} {count or 'no'}" for name, count in counts.items()))
    return rows
