"""Claim of `lsr1`: a learned quasi-Newton optimiser needs fewer gradient evaluations on structured problems than classical and learned first-order peers.

A. Quadratics (condition up to 1,000), Rosenbrock, Rastrigin and Styblinski-Tang, turned and shifted at random, with 2, 10, 50 and 200
   unknowns (trained on 2 to 20); float64. Share of problems solved within 10 and 20 gradient evaluations, to f - f_L <= tolerance (f_0 - f_L), where f_L
   is the best that any system found in 50.
B. Pose from 2-D keypoints: frames 331-455 of a motion clip from 4 random sides, 500 problems of 60 unknowns, from the mean pose; the policy was
   trained on frames 1-300 without knowing the poses. Mean joint error after alignment (PA-MPJPE) after 4, 8 and 16 steps.
C, D. Reported, without a bar: NIST's nonlinear regressions (`lsr1_fits`) and crystals relaxed with CHGNet (`lsr1_crystals`), `generic` as it comes.

In A and B a system's state after k steps is the point of the lowest loss among the first k + 1 it has evaluated. Step sizes of LBFGS, Adam and gradient descent
are the best of a grid, for each family of A and for B, on other problems (B: frames 301-330); the learned ones and plain SR1 have none. Learned peers
and ablations are trained by `scripts/train_lsr1.py` as long as ours and come with the package. An interval of B is over 25 blocks of
5 successive frames, since neighbouring frames are alike.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.claims.lsr1_crystals import relaxations
from acclimate.claims.lsr1_fits import regressions
from acclimate.optim.meta_training import (
    Objective,
    Quadratics,
    TestFunctions,
    rastrigin,
    rosenbrock,
    styblinski,
    with_gradient,
)
from acclimate.optim.pose_problems import PITCH, YAW, PoseProblems, pa_mpjpe
from acclimate.optim.sr1_policy import LSR1Policy, Memory, advised, direction, dot, nonzero

PEERS = Path(__file__).parent / "lsr1_peers"
OURS, NO_SECANT, STRONG = "L-SR1", "L-SR1, no secant penalty", "L-SR1, ten times the secant penalty"
SR1, LGD = "SR1", "LGD"
LBFGS, WOLFE, ADAM, GD = "LBFGS", "LBFGS, strong Wolfe", "Adam", "GD with momentum"
TUNED: dict[str, tuple[float, ...]] = {
    LBFGS: (0.1, 0.3, 1.0),
    WOLFE: (0.1, 0.3, 1.0),
    ADAM: (0.01, 0.03, 0.1, 0.3, 1.0),
    GD: (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3),
}
FAMILIES: dict[str, Any] = {
    "quadratic": Quadratics,
    "rosenbrock": functools.partial(TestFunctions, functions=(rosenbrock,)),
    "rastrigin": functools.partial(TestFunctions, functions=(rastrigin,)),
    "styblinski": functools.partial(TestFunctions, functions=(styblinski,)),
}
BUDGETS_A, TOLERANCES, LONGEST = (10, 20), (1e-3, 1e-5), 50
STEPS_B = (4, 8, 16)
TUNING_SEED = 1000


@dataclass(frozen=True)
class Size:
    seeds: int  # of A
    problems: int  # of A, of each family, dimension and seed
    dimensions: tuple[int, ...]
    frames: int  # of B, from 331 on
    views: int
    tuning: int  # problems of B that step sizes are chosen on
    fits: tuple[str, ...] | None  # of C; None is all
    evaluations: int  # most, of C
    crystals: bool  # D


SIZES: dict[str, Size] = {
    "fast": Size(2, 1, (5,), 4, 1, 1, ("BoxBOD", "Misra1a"), 50, False),
    "default": Size(5, 4, (2, 10, 50, 200), 125, 4, 24, None, 1000, True),
    "full": Size(20, 8, (2, 10, 50, 200), 125, 16, 120, None, 1000, True),
}


class LSR1Claim(Claim):
    name = method = "lsr1"
    statement = (
        "On poses that it was not trained on, L-SR1 has a lower joint error after 4 and 8 steps than learned gradient descent and LBFGS, and than itself "
        "trained without the secant penalty; of analytic problems it solves more within 10 and 20 gradient evaluations than LBFGS, Adam, "
        "gradient descent and plain SR1"
    )
    bars = (
        *(
            Bar(f"PA-MPJPE (mm) after {k} steps", OURS, than, better="lower")
            for k in (4, 8)
            for than in (LGD, LBFGS, NO_SECANT)
        ),
        *(
            Bar(f"share solved to {tolerance:g} within {k}", OURS, than)
            for tolerance in TOLERANCES
            for k in BUDGETS_A
            for than in (LBFGS, WOLFE, ADAM, GD, SR1)
        ),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        rows = [*poses(size, report), *analytic(size, report), *regressions(size.fits, size.evaluations, report)]
        return rows + (relaxations(report) if size.crystals else [])


# --- the learned first-order peer ---


class LearnedGradientDescent(nn.Module):
    """Features (n, 4) of g, the previous g, p and x - x_0 to (n, 2), of about the size of L-SR1's network: a and b of

    d = r (-exp(a) g / rms(g) + b p / rms(p)),    r = rms(p), at first first_step / sqrt(d)
    """

    def __init__(self, width: int = 64, code: int = 32) -> None:
        super().__init__()
        head = nn.Linear(width, 2)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.SiLU(), nn.Linear(width, code), nn.SiLU(), nn.Linear(code, width), nn.SiLU(), head
        )

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.layers(features)
        return found


def learned_gd(
    policy: Any, memory: Memory, x: Tensor, g: Tensor, first_step: float = 0.5
) -> tuple[Tensor, Memory, Tensor]:
    """A step as `sr1_policy.direction` makes one, with the same bound of its length; there is no secant residual."""
    root = x.shape[1] ** 0.5
    p = torch.where(memory.started[:, None], x - memory.x, torch.zeros_like(x))
    pp = dot(p, p)
    P, G = nonzero(pp).sqrt()[:, None] / root, nonzero(dot(g, g)).sqrt()[:, None] / root
    features = torch.stack([g / G, memory.g / G, p / P, (x - memory.x0) / P], dim=2)
    a, b = advised(policy, features.sign() * features.abs().log1p()).unbind(2)
    r = torch.where(pp > 0, pp.sqrt(), torch.full_like(pp, first_step))[:, None] / root
    d = r * (-a.clamp(-6, 2).exp() * g / G + b * p / P)
    share = 2 * pp.sqrt().clamp(min=first_step) / nonzero(dot(d, d).sqrt().detach())
    d = d * share.clamp(max=1)[:, None]
    yes = torch.ones_like(memory.started)
    return (
        d,
        Memory(memory.vectors, memory.gamma, yes, memory.scaled, x, g, memory.x0, memory.counts),
        torch.zeros_like(pp),
    )


# --- solvers: what was evaluated, losses (k, B) and points (k, B, d) ---


@dataclass
class Walk:
    losses: Tensor
    points: Tensor
    residual: float = 0.0
    counts: tuple[int, ...] = ()

    def best(self, steps: int) -> tuple[Tensor, Tensor]:
        """Lowest losses (B,) of the first steps + 1 evaluations, and where."""
        finite = torch.where(self.losses.isfinite(), self.losses, torch.full_like(self.losses, torch.inf))
        value, place = finite[: steps + 1].min(0)
        return value, self.points[place, torch.arange(len(place))]


def by_rule(rule: Any, policy: Any, f: Objective, x: Tensor, evaluations: int) -> Walk:
    memory, losses, points, residuals = Memory.of(x, 4), [], [], []
    with torch.no_grad():
        for _ in range(evaluations):
            value, g = with_gradient(f, x, graph=False)
            losses.append(value)
            points.append(x)
            d, memory, residual = rule(policy, memory, x, torch.nan_to_num(g, posinf=0, neginf=0))
            residuals.append(residual)
            x = x + d
    return Walk(
        torch.stack(losses),
        torch.stack(points),
        float(torch.stack(residuals).mean()),
        tuple(memory.counts.sum(0).tolist()),
    )


def by_optimizer(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], f: Objective, x: Tensor, evaluations: int
) -> Walk:
    """Of optimisers that treat every coordinate alone, so that a batch is as good as each problem."""
    z = nn.Parameter(x.clone())
    optimizer, losses, points = make([z]), [], []
    for _ in range(evaluations):
        value, z.grad = with_gradient(f, z.detach().clone(), graph=False)
        losses.append(value)
        points.append(z.detach().clone())
        optimizer.step()
    return Walk(torch.stack(losses), torch.stack(points))


class _SpentError(Exception):
    pass


def by_lbfgs(lr: float, search: str | None, alone: Sequence[Objective], x: Tensor, evaluations: int) -> Walk:
    """torch.optim.LBFGS on each problem; `alone` are the objectives (1, d) to (1,)."""
    paths = []
    for f, start in zip(alone, x, strict=True):
        z = nn.Parameter(start[None].clone())
        optimizer = torch.optim.LBFGS(
            [z], lr=lr, max_iter=evaluations, max_eval=10 * evaluations, history_size=4, line_search_fn=search,
            tolerance_grad=0, tolerance_change=0,
        )  # fmt: skip
        losses: list[Tensor] = []
        points: list[Tensor] = []

        def closure(
            z: Tensor = z, f: Objective = f, losses: list[Tensor] = losses, points: list[Tensor] = points
        ) -> Tensor:
            if len(losses) == evaluations:
                raise _SpentError
            value, z.grad = with_gradient(f, z.detach().clone(), graph=False)
            losses.append(value)
            points.append(z.detach().clone())
            return value[0]

        try:
            while True:
                optimizer.step(closure)
        except (_SpentError, IndexError):  # the line search of torch fails on values that are not finite
            missing = evaluations - len(losses)
            losses += missing * losses[-1:]
            points += missing * points[-1:]
        paths.append((torch.cat(losses), torch.cat(points)))
    return Walk(torch.stack([path[0] for path in paths], 1), torch.stack([path[1] for path in paths], 1))


def solve(
    system: str,
    lr: float,
    policies: dict[str, Any],
    f: Objective,
    alone: Sequence[Objective],
    x: Tensor,
    evaluations: int,
) -> Walk:
    if system == LGD:
        return by_rule(learned_gd, policies[LGD], f, x, evaluations)
    if system in (OURS, NO_SECANT, STRONG, SR1):
        return by_rule(direction, policies.get(system), f, x, evaluations)
    if system in (LBFGS, WOLFE):
        return by_lbfgs(lr, "strong_wolfe" if system == WOLFE else None, alone, x, evaluations)
    if system == ADAM:
        return by_optimizer(functools.partial(torch.optim.Adam, lr=lr), f, x, evaluations)
    return by_optimizer(functools.partial(torch.optim.SGD, lr=lr, momentum=0.9), f, x, evaluations)


def loaded(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """The policies of "generic" or "pose", and of its peers."""
    found: dict[str, Any] = {
        OURS: LSR1Policy.from_pretrained(kind),
        NO_SECANT: LSR1Policy.from_pretrained(PEERS / f"{kind}-no-secant"),
    }
    if kind == "pose":
        found[STRONG] = LSR1Policy.from_pretrained(PEERS / "pose-strong-secant")
        found[LGD] = LearnedGradientDescent()
        found[LGD].load_state_dict(load_file(PEERS / "pose-lgd" / "model.safetensors"))
    return {name: policy.to(dtype).requires_grad_(False) for name, policy in found.items()}


# --- A ---


def drawn(family: str, d: int, count: int, seed: int) -> tuple[Objective, list[Objective], Tensor]:
    """`count` problems in float64: their losses together, each alone, and the starts."""
    task = FAMILIES[family](dimensions=(d,))
    f, x, _ = task.sample(count, torch.Generator().manual_seed(100_000 * seed + d))
    x = x.double()

    def one(row: int) -> Objective:
        def alone(z: Tensor) -> Tensor:
            return f(torch.cat([x[:row], z, x[row + 1 :]]))[row : row + 1]

        return alone

    return f, [one(row) for row in range(count)], x


def analytic(size: Size, report: Callable[[str], None]) -> list[Row]:
    policies = loaded("generic", torch.float64)
    systems = (OURS, NO_SECANT, SR1, LBFGS, WOLFE, ADAM, GD)
    solved: dict[tuple[str, float, int], list[list[float]]] = {}
    rates: dict[str, dict[str, float]] = {}
    residual: dict[str, list[float]] = {OURS: [], NO_SECANT: []}
    for family in FAMILIES:
        rates[family] = {}
        tuning = [drawn(family, d, size.problems, TUNING_SEED) for d in size.dimensions]
        for system, grid in TUNED.items():
            gaps = {lr: gap_after_20(system, lr, tuning) for lr in grid}
            rates[family][system] = min(gaps, key=gaps.__getitem__)
        report(f"A, {family}: step sizes {', '.join(f'{name} {lr:g}' for name, lr in rates[family].items())}")
        for seed in range(size.seeds):
            for d in size.dimensions:
                f, alone, x = drawn(family, d, size.problems, seed)
                paths = {
                    system: solve(system, rates[family].get(system, 1.0), policies, f, alone, x, LONGEST + 1)
                    for system in systems
                }
                f0 = paths[OURS].losses[0]
                lowest = torch.stack([path.best(LONGEST)[0] for path in paths.values()]).min(0).values
                for system, path in paths.items():
                    if system in residual:
                        residual[system].append(path.residual)
                    for tolerance in TOLERANCES:
                        for k in BUDGETS_A:
                            done = path.best(k - 1)[0] - lowest <= tolerance * (f0 - lowest)
                            seeds = solved.setdefault((system, tolerance, k), [[] for _ in range(size.seeds)])
                            seeds[seed] += done.double().tolist()
    rows = []
    for (system, tolerance, k), by_seed in solved.items():
        extra = {"lr": {family: rate[system] for family, rate in rates.items()}} if system in TUNED else {}
        shares = [statistics.fmean(values) for values in by_seed]
        rows.append(
            Row.from_values(
                system, f"share solved to {tolerance:g} within {k}", shares, list(range(size.seeds)), extra=extra
            )
        )
        report(f"A, {system}: {rows[-1].metric}: {rows[-1].mean:.3f}")
    rows += [
        Row.from_values(name, "secant residual A", [statistics.fmean(values)], [0]) for name, values in residual.items()
    ]
    return rows


def gap_after_20(system: str, lr: float, problems: Sequence[tuple[Objective, list[Objective], Tensor]]) -> float:
    """Mean log10 of the loss after 20 evaluations over the first."""
    gaps = []
    for f, alone, x in problems:
        path = solve(system, lr, {}, f, alone, x, 20)
        gaps.append(float((path.best(19)[0] / path.losses[0]).clamp(min=1e-12).log10().mean()))
    return statistics.fmean(gaps)


# --- B ---


def poses(size: Size, report: Callable[[str], None]) -> list[Row]:
    policies = loaded("pose", torch.float32)
    evaluations = max(STEPS_B) + 1

    def cases(problems: PoseProblems, frames: Tensor, seed: int) -> tuple[Objective, list[Objective], Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        angles = (2 * torch.rand(2, len(frames), generator=draw) - 1) * torch.tensor([[YAW], [PITCH]])
        f, truth = problems.problems(frames, angles)
        alone = [problems.problems(frames[i : i + 1], angles[:, i : i + 1])[0] for i in range(len(frames))]
        return f, alone, problems.start.repeat(len(frames), 1), truth

    held_out = PoseProblems(300, 330)
    f, alone, x, truth = cases(held_out, torch.arange(size.tuning) % 30, TUNING_SEED)

    def error(path: Walk, truth: Tensor, k: int) -> Tensor:
        return pa_mpjpe(held_out.found(path.best(k)[1]), truth)

    rates = {}
    for system, grid in TUNED.items():
        tried = {lr: float(error(solve(system, lr, {}, f, alone, x, 9), truth, 8).mean()) for lr in grid}
        rates[system] = min(tried, key=tried.__getitem__)
    report(f"B: step sizes {', '.join(f'{name} {lr:g}' for name, lr in rates.items())}")

    frames = torch.arange(size.frames).repeat_interleave(size.views)
    f, alone, x, truth = cases(PoseProblems(330, 330 + size.frames), frames, 0)
    block = 5 * size.views if size.frames >= 25 else size.views
    start = pa_mpjpe(held_out.found(x), truth).view(-1, block).mean(1).tolist()
    blocks = list(range(len(start)))
    rows = []
    for system in (OURS, NO_SECANT, STRONG, LGD, SR1, LBFGS, WOLFE, ADAM, GD):
        path = solve(system, rates.get(system, 1.0), policies, f, alone, x, evaluations)
        for k in STEPS_B:
            extra: dict[str, Any] = {"lr": rates[system]} if system in rates else {}
            if path.counts:
                extra = {"norm_guard, negative_curvature, no_pair": list(path.counts), "of_steps": len(x) * evaluations}
            values = error(path, truth, k).view(-1, block).mean(1).tolist()
            rows.append(Row.from_values(system, f"PA-MPJPE (mm) after {k} steps", values, blocks, extra=extra))
            rows.append(
                Row.from_values(
                    system, f"loss B after {k} steps", path.best(k)[0].view(-1, block).mean(1).tolist(), blocks
                )
            )
        report(f"B, {system}: " + ", ".join(f"{row.mean:.2f} mm" for row in rows[-6::2]))
        if system in (OURS, NO_SECANT, STRONG):
            rows.append(Row.from_values(system, "secant residual B", [path.residual], [0]))
    rows.append(Row.from_values("mean pose", "PA-MPJPE (mm) after 4 steps", start, blocks))
    return sorted(rows, key=lambda row: row.metric != "PA-MPJPE (mm) after 4 steps")


CLAIM = LSR1Claim()
