"""Train the network of L-SR1 on problems like yours, by unrolling its steps through them.

A task family draws a batch of problems (f, x0, f_lo). K steps from x0 are unrolled; with c_k from 0.5 to 1.5 the loss is

    mean_k c_k log10((f_k - f_lo) / (f_0 - f_lo) + 1e-6) + w_sec mean_k |p_k - B_{k+1} q_k|^2 / |p_k|^2

The gradient of f that a step sees is a constant; that the step moves the next points is not. Half of the batches start where 8 steps, not
trained through, have led. The second term is the secant penalty of arXiv 2508.12270.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acclimate.optim.pose_problems import PoseProblems
from acclimate.optim.sr1_policy import Memory, direction

Objective = Callable[[Tensor], Tensor]  # (B, d) to (B,), each row a problem
WARM_UP = 8
DROPPED = 0.2  # most batches of a family that may diverge


class Task(Protocol):
    """A family of problems: `sample(batch, generator)` returns f, the starts x0 (batch, d), and known minima or lower bounds (batch,)."""

    @property
    def name(self) -> str: ...

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Objective, Tensor, Tensor]: ...


@dataclass
class History:
    """Of each meta-step: the loss and the mean secant residual; and how many batches of a family diverged and were left out."""

    loss: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def with_gradient(f: Objective, x: Tensor, graph: bool) -> tuple[Tensor, Tensor]:
    """f(x) (B,), with a graph where asked for, and its gradient (B, d), without."""
    with torch.enable_grad():
        if not graph:
            x = x.detach()
        if not x.requires_grad:
            x = x.requires_grad_()
        losses = f(x)
        (g,) = torch.autograd.grad(losses.sum(), x, retain_graph=graph)
    return losses if graph else losses.detach(), g


def unroll(
    policy: Any, f: Objective, x: Tensor, memory: Memory, steps: int, graph: bool = True, rule: Any = direction
) -> tuple[Tensor, Tensor, Tensor, Memory]:
    """`steps` steps from `x` (B, d): losses (steps + 1, B), secant residuals (steps, B), the last x, and the memory."""
    losses, residuals = [], []
    for _ in range(steps):
        value, g = with_gradient(f, x, graph)
        losses.append(value)
        with torch.set_grad_enabled(graph):
            d, memory, residual = rule(policy, memory, x.detach(), g)
            x = x + d
        residuals.append(residual)
    with torch.set_grad_enabled(graph):
        losses.append(f(x))
    return torch.stack(losses), torch.stack(residuals), x, memory


def meta_loss(losses: Tensor, residuals: Tensor, f_lo: Tensor, w_sec: float) -> Tensor:
    """Scalar, of what `unroll` returns. A problem that starts at its minimum counts for nothing."""
    gap = (losses[0].detach() - f_lo).clamp(min=1e-12)
    weights = torch.linspace(0.5, 1.5, len(losses) - 1).to(losses)[:, None]
    progress = ((losses[1:] - f_lo).clamp(min=0) / gap + 1e-6).log10()
    return (weights * progress).mean() + w_sec * residuals.mean()


def meta_train(
    policy: nn.Module,
    tasks: Sequence[Task],
    steps: int = 2000,
    unroll_steps: int = 10,
    batch: int = 32,
    lr: float = 1e-3,
    w_sec: float = 0.1,
    clip: float = 1.0,
    buffer: int = 4,
    seed: int = 0,
    device: Any = None,
    rule: Any = direction,
    report: Callable[[str], None] | None = None,
) -> History:
    """Train `policy` in place with AdamW and a cosine schedule; every meta-step takes one batch of one family, in turn.

    `rule` makes the steps, as `direction` does. RuntimeError, with the family: more than a fifth of its batches diverged (looked at from the tenth on).
    """
    policy.to(device).train()
    draw = torch.Generator().manual_seed(seed)
    adam = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    history, tried = History(), Counter[str]()
    for step in range(steps):
        task = tasks[step % len(tasks)]
        f, x, f_lo = task.sample(batch, draw)
        x, f_lo = x.to(device), f_lo.to(device)
        memory = Memory.of(x, buffer)
        if torch.rand(1, generator=draw) < 0.5:
            _, _, x, memory = unroll(policy, f, x, memory, WARM_UP, graph=False, rule=rule)
        losses, residuals, _, _ = unroll(policy, f, x, memory, unroll_steps, rule=rule)
        loss = meta_loss(losses, residuals, f_lo, w_sec)
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), clip)
        tried[task.name] += 1
        if math.isfinite(float(loss.detach())) and math.isfinite(float(norm)):
            adam.step()
            schedule.step()
            history.loss.append(float(loss.detach()))
            history.residual.append(float(residuals.detach().mean()))
        else:
            history.dropped[task.name] += 1
            if tried[task.name] >= 10 and history.dropped[task.name] > DROPPED * tried[task.name]:
                raise RuntimeError(
                    f"{history.dropped[task.name]} of {tried[task.name]} batches of the family '{task.name}' diverged: scale its problems, or lower lr"
                )
        if report and (step + 1) % 100 == 0:
            recent = history.loss[-100:]
            report(
                f"step {step + 1}: loss {sum(recent) / max(1, len(recent)):.3f}, secant residual {sum(history.residual[-100:]) / max(1, len(recent)):.3f}"
            )
    policy.eval()
    return history


# --- families of problems ---


@dataclass(frozen=True)
class Quadratics:
    """1/2 (x - c)^T A (x - c), eigenvalues of A log-uniform over a condition of up to `condition`, turned at random."""

    dimensions: tuple[int, ...] = (5, 10, 20)
    condition: float = 1e3
    name: str = "quadratic"

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Objective, Tensor, Tensor]:
        d = _chosen(self.dimensions, generator)
        Q = torch.linalg.qr(torch.randn(batch, d, d, generator=generator)).Q
        span = math.log10(self.condition) * torch.rand(batch, 1, generator=generator)
        A = (Q * 10 ** (span * torch.rand(batch, d, generator=generator))[:, None]) @ Q.mT
        c = torch.randn(batch, d, generator=generator)

        def f(x: Tensor) -> Tensor:
            z = x - c.to(x)
            return 0.5 * ((A.to(x) @ z[..., None])[..., 0] * z).sum(1)

        return f, c + torch.randn(batch, d, generator=generator), torch.zeros(batch)


def rosenbrock(z: Tensor) -> Tensor:
    """(B,) of (B, d); its minimum, at ones, is 0."""
    return (100 * (z[:, 1:] - z[:, :-1].square()).square() + (1 - z[:, :-1]).square()).sum(1)


def rastrigin(z: Tensor) -> Tensor:
    """Minimum 0 at 0."""
    return (z.square() + 10 * (1 - (2 * math.pi * z).cos())).sum(1)


def styblinski(z: Tensor) -> Tensor:
    """Styblinski-Tang, shifted so that its minimum (every coordinate -2.903534) is 0."""
    return (0.5 * (z**4 - 16 * z.square() + 5 * z) + 39.16616570377142).sum(1)


@dataclass(frozen=True)
class TestFunctions:
    """Rosenbrock, Rastrigin or Styblinski-Tang of R (x - c): turned (unless `turned` is False) and shifted at random, each batch one of them."""

    dimensions: tuple[int, ...] = (2, 5, 10)
    functions: tuple[Objective, ...] = (rosenbrock, rastrigin, styblinski)
    name: str = "test functions"
    __test__ = False  # for pytest: this is no test

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Objective, Tensor, Tensor]:
        d = _chosen(self.dimensions, generator)
        function = self.functions[int(torch.randint(len(self.functions), (1,), generator=generator))]
        R = torch.linalg.qr(torch.randn(batch, d, d, generator=generator)).Q
        c = torch.randn(batch, d, generator=generator)

        def f(x: Tensor) -> Tensor:
            return function((R.to(x) @ (x - c.to(x))[..., None])[..., 0])

        return f, c + 1.5 * torch.randn(batch, d, generator=generator), torch.zeros(batch)


class LogisticRegressions:
    """Ridge-regularised logistic regression on resampled rows and columns of scikit-learn's breast cancer table."""

    name = "logistic"

    def __init__(self, rows: int = 64, dimensions: tuple[int, ...] = (5, 10, 20)) -> None:
        from sklearn.datasets import load_breast_cancer

        table = load_breast_cancer()
        x = torch.from_numpy(table.data).float()
        self.x, self.y = (x - x.mean(0)) / x.std(0), torch.from_numpy(table.target).float()
        self.rows, self.dimensions = rows, dimensions

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Objective, Tensor, Tensor]:
        d = _chosen(self.dimensions, generator)
        columns = torch.stack([torch.randperm(self.x.shape[1], generator=generator)[:d] for _ in range(batch)])
        chosen = torch.randint(len(self.x), (batch, self.rows), generator=generator)
        X = self.x[chosen].gather(2, columns[:, None].expand(-1, self.rows, -1))
        X = X * (2 * self.y[chosen] - 1)[..., None]
        penalty = 10 ** (-3 + 2 * torch.rand(batch, generator=generator))

        def f(w: Tensor) -> Tensor:
            margin = (X.to(w) @ w[..., None])[..., 0]
            return nn.functional.softplus(-margin).mean(1) + 0.5 * penalty.to(w) * w.square().sum(1)

        best = torch.zeros(batch, d)
        for _ in range(12):  # Newton's method finds the minimum
            share = torch.sigmoid(-(X @ best[..., None])[..., 0])
            g = -(X * share[..., None]).mean(1) + penalty[:, None] * best
            H = (X * (share * (1 - share))[..., None]).mT @ X / self.rows + penalty[:, None, None] * torch.eye(d)
            best = best - torch.linalg.solve(H, g)
        return f, torch.randn(batch, d, generator=generator), f(best) - 1e-6


@dataclass(frozen=True)
class CurveFits:
    """Least squares of y = a exp(-b^2 t) + c exp(-e^2 t) + h at 24 times, without noise, from 30 % beside the truth."""

    name: str = "curve fit"

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Objective, Tensor, Tensor]:
        t = torch.linspace(0, 3, 24)
        truth = torch.tensor([1.0, 0.7, 1.0, 1.7, 0.2]) * (1 + 0.5 * (torch.rand(batch, 5, generator=generator) - 0.5))

        def curve(x: Tensor) -> Tensor:
            a, b, c, e, h = x[..., None].unbind(1)
            return a * (-b.square() * t.to(x)).exp() + c * (-e.square() * t.to(x)).exp() + h

        target = curve(truth)

        def f(x: Tensor) -> Tensor:
            return (curve(x) - target.to(x)).square().mean(1)

        return f, truth * (1 + 0.3 * torch.randn(batch, 5, generator=generator)), torch.zeros(batch)


def _chosen(dimensions: tuple[int, ...], generator: torch.Generator) -> int:
    return dimensions[int(torch.randint(len(dimensions), (1,), generator=generator))]


def families(names: Sequence[str]) -> list[Task]:
    """The families that come with the package, by name: quadratic, functions, logistic, curves, pose. ValueError for another."""
    known: dict[str, Callable[[], Task]] = {
        "quadratic": Quadratics, "functions": TestFunctions, "logistic": LogisticRegressions, "curves": CurveFits, "pose": PoseProblems,
    }  # fmt: skip
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown family {', '.join(unknown)}: choose {', '.join(known)}")
    return [known[name]() for name in names]
