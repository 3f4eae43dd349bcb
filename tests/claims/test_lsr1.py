"""The claim of L-SR1: its parts at the smallest size, and what it measures with."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

from acclimate.claims.lsr1 import (
    ADAM,
    CLAIM,
    GD,
    LBFGS,
    LGD,
    NO_SECANT,
    OURS,
    SR1,
    STRONG,
    WOLFE,
    LearnedGradientDescent,
    Walk,
    by_lbfgs,
    drawn,
    learned_gd,
    solve,
)
from acclimate.claims.lsr1_crystals import INSTALL, METRIC, relaxations
from acclimate.claims.lsr1_fits import evaluations, fits, solvers
from acclimate.optim.sr1_policy import Memory


def test_the_smallest_run_has_every_bar() -> None:
    torch.set_num_threads(1)
    evidence = CLAIM.run("fast")
    measured = {(row.system, row.metric) for row in evidence.rows}
    assert all((system, bar.metric) in measured for bar in CLAIM.bars for system in (bar.system, bar.than))
    assert evidence.rows[0].metric == "PA-MPJPE (mm) after 4 steps"
    errors = {row.system: row.mean for row in evidence.rows if row.metric == "PA-MPJPE (mm) after 4 steps"}
    assert set(errors) == {OURS, NO_SECANT, STRONG, LGD, SR1, LBFGS, WOLFE, ADAM, GD, "mean pose"}
    assert errors[OURS] < errors["mean pose"]
    shares = [row.mean for row in evidence.rows if row.metric.startswith("share")]
    assert all(0 <= share <= 1 for share in shares)
    fits = {
        row.system: row.mean
        for row in evidence.rows
        if row.metric == "share of NIST's regressions solved within 50 evaluations"
    }
    assert fits["SciPy BFGS"] == fits["SciPy L-BFGS-B"] == 1.0
    assert fits.keys() == {OURS, SR1, "SciPy BFGS", "SciPy L-BFGS-B"}


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_gets_as_many_evaluations_as_it_is_given(search: str | None) -> None:
    f, alone, x = drawn("rosenbrock", 4, 2, 0)
    path = by_lbfgs(0.3, search, alone, x, 15)
    assert path.losses.shape == (15, 2)
    torch.testing.assert_close(path.losses[7], f(path.points[7]))
    assert (path.best(14)[0] <= path.losses[0]).all()


@pytest.mark.parametrize("system", [ADAM, GD])
def test_batched_first_order_peers_are_each_problem_alone(system: str) -> None:
    f, alone, x = drawn("quadratic", 3, 2, 0)
    path = solve(system, 0.01, {}, f, alone, x, 6)
    for row in range(2):
        one = solve(system, 0.01, {}, alone[row], [alone[row]], x[row : row + 1], 6)
        torch.testing.assert_close(one.losses[:, 0], path.losses[:, row])


def test_the_best_point_ignores_what_is_not_finite() -> None:
    losses = torch.tensor([[3.0], [float("nan")], [2.0], [5.0]])
    path = Walk(losses, torch.arange(4.0).view(4, 1, 1))
    assert [float(path.best(k)[0]) for k in range(4)] == [3.0, 3.0, 2.0, 2.0]
    assert float(path.best(3)[1]) == 2.0


def test_untrained_learned_gradient_descent_is_normalised_gradient_descent() -> None:
    x, g = torch.ones(2, 4), torch.tensor([[1.0, 2.0, 2.0, 4.0], [0.0, 3.0, 0.0, 4.0]])
    with torch.no_grad():
        d, memory, _ = learned_gd(LearnedGradientDescent(), Memory.of(x, 1), x, g)
        torch.testing.assert_close(d, -0.5 * g / g.norm(dim=1, keepdim=True))
        again, _, _ = learned_gd(LearnedGradientDescent(), memory, x + d, 7 * g)
    torch.testing.assert_close(again, d)  # as long as the step before


def test_every_regression_has_nists_minimum_at_nists_parameters() -> None:
    assert len(fits()) == 27
    for fit in fits():
        squares = float(fit.squares(fit.certified))
        if fit.name == "Lanczos1":  # exact data: 1.4e-25, which eleven digits of the parameters do not reach
            assert squares < 1e-19
        else:
            assert squares == pytest.approx(fit.sum_of_squares, rel=1e-9), fit.name
        assert float(fit.squares(fit.start)) > (1 + 1e-3) * fit.sum_of_squares, fit.name
        at = fit.certified.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fit.squares(at), at)
        scale = fit.squares(fit.start) / fit.certified.abs()
        if fit.name not in ("Lanczos1", "ENSO"):
            assert float((slope / scale).abs().max()) < 1e-4, fit.name  # a stationary point


def test_evaluations_are_counted_to_the_first_point_that_is_good_enough() -> None:
    fit = next(fit for fit in fits() if fit.name == "BoxBOD")
    at_start_then_there = [np.ones(2), (fit.certified / fit.start).numpy()]

    def jump(f, z):
        np.testing.assert_array_equal(z, at_start_then_there[0])
        for point in (z, at_start_then_there[1], z):
            value, slope = f(point)
            assert slope.shape == (2,)
            if point is z:
                assert value == pytest.approx(1.0)

    assert evaluations(jump, fit, 10)[0] == 2
    count, excess = evaluations(jump, fit, 1)
    assert count is None
    assert excess == pytest.approx(float(fit.squares(fit.start)) / fit.sum_of_squares - 1)
    assert evaluations(solvers()["SR1"], fit, 200)[0] is not None


def test_without_chgnet_the_row_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    (row,) = relaxations(said.append)
    assert row.metric == METRIC
    assert math.isnan(row.mean)
    assert row.extra == {"install": INSTALL}
    assert INSTALL in said[0]
    assert "acclimate[materials]" in INSTALL


def test_crystals_are_rattled_and_force_calls_are_counted() -> None:
    pytest.importorskip("ase")
    from ase.calculators.emt import EMT

    from acclimate.claims.lsr1_crystals import crystals, optimisers, relaxed

    structures = crystals()
    assert len(structures) == 20
    assert all(4 <= len(atoms) <= 16 for atoms in structures.values())
    again = crystals()
    assert all(np.array_equal(again[name].positions, atoms.positions) for name, atoms in structures.items())
    calculator, energies = EMT(), []
    for make in optimisers().values():
        calls, energy = relaxed(make, structures["Cu"].copy(), calculator)
        assert calls is not None
        assert 4 < calls < 60
        energies.append(energy)
    assert max(energies) - min(energies) < 1e-3
    assert "calculate" not in vars(calculator)
