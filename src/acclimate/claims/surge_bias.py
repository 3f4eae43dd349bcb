"""How far a straight-through estimator and SURGE are from a gradient that is known, on a layer of two signs.

    python -m acclimate.claims.surge_bias -o folder

y_i = sign(w_i x_i + sigma e_i), e standard normal, i = 1, 2; the loss is y_1 + y_2. Its mean has the gradient w_i 2 phi(w_i x_i / sigma) / sigma, phi
the normal density. The estimators see one draw of e at a time: g_b,i = w_i 1[|w_i x_i + sigma e_i| <= 1], and SURGE adds lambda g_a of an
auxiliary weight, g_a,i = a_i = w_i (1 + n_i / 2), n standard normal, lambda as its layers choose it.

For points x on a grid and some sigma, `measure` has the cosine between the estimators' means and the truth, their bias (norm of mean minus truth)
and their mean squared error, and that of lambda* = <truth - mu_b, mu_a> / (||mu_a||^2 + tr Var g_a), which the paper's analysis says is best.
Draws of e and n are crossed, so that g_b and g_a are uncorrelated exactly, which lambda* assumes.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from acclimate import runs
from acclimate.compress.binary_gradients import compensation, through

SIGMAS = (0.25, 0.5, 1.0, 2.0)
WEIGHT = (1.0, 0.5)


def smoothed_gradient(w: torch.Tensor, x: torch.Tensor, sigma: float) -> torch.Tensor:
    """d/dx_i of the mean of sign(w_i x_i + sigma e)."""
    return w * 2 * torch.exp(-((w * x / sigma) ** 2) / 2) / (math.sqrt(2 * math.pi) * sigma)


def measure(
    side: int = 13,
    sigmas: Sequence[float] = SIGMAS,
    eta: float = 0.3,
    draws: tuple[int, int] = (400, 20),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row a point of the grid (`side` x `side` over [-3, 3]^2) and sigma; `draws` of e and of n."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.tensor(WEIGHT, dtype=torch.float64)
    noise, spread = (torch.randn(count, 2, generator=generator, dtype=torch.float64) for count in draws)
    g_a = w * (1 + spread / 2)
    place = torch.linspace(-3, 3, side, dtype=torch.float64)
    rows = []
    for sigma in sigmas:
        for x in torch.cartesian_prod(place, place):
            true = smoothed_gradient(w, x, sigma)
            z = w * x + sigma * noise
            g_b = through(w.expand_as(z), z, "ste")
            pairs_b, pairs_a = (g.expand(*draws, 2).reshape(-1, 2) for g in (g_b[:, None], g_a))
            lam = compensation(pairs_b, pairs_a, eta, "sample", None, False)
            surge = pairs_b + lam * pairs_a
            best = float((true - g_b.mean(0)) @ g_a.mean(0) / g_a.square().sum(1).mean())
            rows.append(
                {
                    "sigma": sigma, "x1": float(x[0]), "x2": float(x[1]),
                    "cosine_ste": _cosine(g_b.mean(0), true), "cosine_surge": _cosine(surge.mean(0), true),
                    "bias_ste": float((g_b.mean(0) - true).norm()), "bias_surge": float((surge.mean(0) - true).norm()),
                    "mse_ste": _error(pairs_b, true), "mse_surge": _error(surge, true), "mse_best": _error(pairs_b + best * pairs_a, true),
                    "lambda": float(lam.mean()), "lambda_best": best,
                }
            )  # fmt: skip
    return rows


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """0 where a is 0."""
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).square().sum(1).mean())


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Means over the grid, a row a sigma."""
    means = [name for name in rows[0] if name not in ("sigma", "x1", "x2")]
    return [
        {
            "sigma": sigma,
            **{name: statistics.fmean(row[name] for row in rows if row["sigma"] == sigma) for name in means},
        }
        for sigma in dict.fromkeys(row["sigma"] for row in rows)
    ]


def write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """surge-bias.csv and surge-bias.svg."""
    from acclimate.report.plots import lines, standalone

    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in rows)
    runs.write_text(folder / "surge-bias.csv", text.getvalue())
    means = summary(rows)
    curves = {
        name: [(row["sigma"], row[key]) for row in means]
        for name, key in (
            ("STE, cosine", "cosine_ste"), ("SURGE, cosine", "cosine_surge"), ("STE, bias", "bias_ste"), ("SURGE, bias", "bias_surge"),
        )
    }  # fmt: skip
    drawn = lines(curves, "sigma", "mean over the grid")
    assert drawn is not None
    runs.write_text(folder / "surge-bias.svg", standalone(drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="folder of surge-bias.csv and surge-bias.svg")
    rows = measure()
    write(rows, parser.parse_args().output)
    for row in summary(rows):
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
