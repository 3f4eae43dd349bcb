"""The claim of L-SR1: its parts at the smallest size, and what it measures with."""

from __future__ import annotations

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
    shares = [row.mean for row in evidence.rows if row.metric.startswith("share solved")]
    assert all(0 <= share <= 1 for share in shares)


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
