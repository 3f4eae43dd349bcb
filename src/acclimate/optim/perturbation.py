"""Parameters that are evaluated a little beside where they are, and moved by low-rank steps or noise: what zeroth-order optimisers do to them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def generator_of(*numbers: int) -> torch.Generator:
    """A random generator on the CPU that depends on nothing but the numbers, so that every device and process draws alike."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def stochastic_rounding(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """`value` (float32) in a 16-bit type, up or down at random so that its mean is kept."""
    near = value.to(dtype)
    gap = value - near.float()
    other = torch.nextafter(near, torch.full_like(near, torch.inf).copysign(gap.to(dtype)))
    draw = torch.rand(value.shape, generator=generator).to(value.device)
    return torch.where(draw * (other.float() - near.float()).abs() < gap.abs(), other, near)


@dataclass(eq=False)
class Matrix:
    """A trained matrix p (m, n) and its change in a period, scale p + L R^T - p: one of L (m, k), R (n, k) is the basis, the other, `free`,
    what the steps have found.

    With a `module`, an nn.Linear or Conv1D that owns p, the change is added to the module's output and p stays as it is until `fold`;
    without, p is changed at once.
    """

    name: str
    p: nn.Parameter
    group: dict[str, Any]
    module: nn.Module | None
    rank: int  # columns of the basis that last the period
    extra: int  # columns for directions that are tried once
    right: bool = True  # the basis is on the side of p's columns
    used: int = 0  # columns that hold something
    scale: float = 1.0  # what weight decay has left of p

    def __post_init__(self) -> None:
        nothing = torch.empty(0)
        self.basis = self.free = self.sums = self.momentum = self.kept = self.draw = nothing
        self.place = slice(0)  # the columns of this step, whose free factor is `draw`
        self._now: Tensor | None = None
        self.hook = None if self.module is None else self.module.register_forward_hook(self._add_to_output)

    @property
    def sizes(self) -> tuple[int, int]:
        """(rows of the basis, rows of the free factor)."""
        m, n = self.p.shape
        return (n, m) if self.right else (m, n)

    def begin(self, basis: Tensor) -> None:
        """Start a period with the basis (sizes[0], rank)."""
        fixed, free = self.sizes
        self.basis = basis.new_zeros(fixed, self.rank + self.extra)
        self.basis[:, : self.rank] = basis
        self.free = basis.new_zeros(free, self.rank + self.extra)
        self.sums = basis.new_zeros(free, self.rank)
        self.used = self.rank

    def choose(self, place: slice, generator: torch.Generator) -> None:
        """Draw this step's free factor for the columns `place`."""
        self.place = place
        width = len(range(*place.indices(self.rank + self.extra)))
        self.draw = torch.randn(self.sizes[1], width, generator=generator).to(self.p.device)
        self.used = max(self.used, place.stop)

    def product(self, place: slice, free: Tensor) -> Tensor:
        """L R^T (m, n) of some columns of the basis and a free factor (., k)."""
        basis = self.basis[:, place]
        return free @ basis.T if self.right else basis @ free.T

    def perturb(self, amount: float) -> None:
        """From here on act as p + amount Z, beside the change so far; 0 ends it, of what is not done in place."""
        if self.module is None:
            self.p.add_(self.product(self.place, self.draw).to(self.p.dtype), alpha=amount)
        elif amount:
            self._now = self.free.clone()
            self._now[:, self.place] += amount * self.draw
        else:
            self._now = None

    def move(self, lr: float, step: Tensor, decay: float) -> None:
        """p <- (1 - lr decay) p - lr step b^T with the basis columns b of this step; `step` is like `draw`."""
        if self.module is None:
            self.p.mul_(1 - lr * decay)
            self.p.add_(self.product(self.place, step).to(self.p.dtype), alpha=-lr)
        else:
            self.scale *= 1 - lr * decay
            self.free *= 1 - lr * decay
            self.free[:, self.place] -= lr * step

    def fold(self, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Put the change into p, 16-bit ones by stochastic rounding; returns L and R, or None where there is no change."""
        if self.module is None or (self.scale == 1 and not self.free.any()):
            return None
        change = self.product(slice(self.used), self.free[:, : self.used])
        if self.p.element_size() < 4:
            self.p.copy_(stochastic_rounding(self.scale * self.p.float() + change, self.p.dtype, generator))
        else:
            self.p.mul_(self.scale).add_(change.to(self.p.dtype))
        basis, free = self.basis[:, : self.used].clone(), self.free[:, : self.used].clone()
        self.free.zero_()
        self.scale = 1.0
        return (free, basis) if self.right else (basis, free)

    def _add_to_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self.used:
            return output
        free = self.free if self._now is None else self._now
        left, right = (free, self.basis) if self.right else (self.basis, free)
        inner, outer = (left, right) if isinstance(module, Conv1D) else (right, left)
        x = args[0]
        change = (x @ inner[:, : self.used].to(x.dtype)) @ outer[:, : self.used].to(x.dtype).T
        if self.scale != 1:
            bias: Any = getattr(module, "bias", None)
            output = self.scale * output if bias is None else self.scale * (output - bias) + bias
        return output + change.to(output.dtype)


@dataclass(eq=False)
class Noisy:
    """A parameter that is perturbed in place by Gaussian noise of its own size; its exact value lies aside, in float32 or better."""

    name: str
    p: nn.Parameter
    group: dict[str, Any]

    def __post_init__(self) -> None:
        self.exact = self.p.detach().to(torch.promote_types(self.p.dtype, torch.float32), copy=True)

    def perturb(self, amount: float, z: Tensor) -> None:
        self.p.copy_(self.exact + amount * z)

    def settle(self) -> None:
        self.p.copy_(self.exact)

    def move(self, lr: float, step: Tensor, decay: float) -> None:
        self.exact.mul_(1 - lr * decay).sub_(lr * step)
        self.settle()
