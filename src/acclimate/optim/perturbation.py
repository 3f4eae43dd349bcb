"""Parameters that are evaluated a little beside where they are, and moved by low-rank steps or noise: what zeroth-order optimisers do to them.

Scale: a sharded parameter (DTensor: FSDP2, tensor parallelism) takes its part of a change that every process has in full as two thin factors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from acclimate.optim.sharding import local, placed_like

Factors = tuple[Tensor, ...]  # L (m, k) and R (n, k) of L R^T
PARTS = ("basis", "free", "sums", "momentum", "kept")  # of a Matrix, the tensors that it goes on from


def generator_of(*numbers: int) -> torch.Generator:
    """A random generator on the CPU that depends on nothing but the numbers, so that every device and process draws alike."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def stochastic_rounding(value: Tensor, draw: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` (float32) in a 16-bit type, up or down as `draw` (uniform in [0, 1)) says, so that its mean is kept."""
    near = value.to(dtype)
    gap = value - near.float()
    other = torch.nextafter(near, torch.full_like(near, torch.inf).copysign(gap.to(dtype)))
    return torch.where(draw * (other.float() - near.float()).abs() < gap.abs(), other, near)


def sum_of(known: Factors | None, new: Factors, rank: int) -> Factors:
    """The sum of two changes, the best of `rank` where they have more."""
    left, right = (torch.cat([a, b], dim=1) for a, b in zip(known, new, strict=True)) if known else new
    if left.shape[1] <= rank:
        return left, right
    (Q, S), (P, T) = torch.linalg.qr(left.double()), torch.linalg.qr(right.double())
    U, sigma, Vt = torch.linalg.svd(S @ T.T, full_matrices=False)
    cut = slice(rank)
    return (Q @ (U[:, cut] * sigma[cut])).to(left), (P @ Vt[cut].T).to(right)


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight in another form than floating-point numbers (acclimate's, bitsandbytes')."""
    if not isinstance(module, nn.Linear):
        return False
    stored: Any = module._parameters.get("weight")
    return stored is None or not stored.is_floating_point() or hasattr(stored, "quant_state")


@dataclass(eq=False)
class Matrix:
    """A trained matrix p (m, n) and its change in a period, scale p + L R^T - p: one of L (m, k), R (n, k) is the basis, the other, `free`,
    what the steps have found.

    With a `module`, an nn.Linear or Conv1D that owns p, the change is added to the module's output and p stays as it is until `fold`;
    without, p is changed at once. Without p, the module's weight is quantised and stays for good: `fold` adds to the factors `grown`.
    """

    name: str
    p: nn.Parameter | None
    group: dict[str, Any]
    module: nn.Module | None
    rank: int  # columns of the basis that last the period
    extra: int  # columns for directions that are tried once
    adapter_rank: int | None = None  # of `grown`, the sum of all changes; None: it is not kept
    right: bool = True  # the basis is on the side of p's columns

    def __post_init__(self) -> None:
        nothing = torch.empty(0)
        self.basis = self.free = self.sums = self.momentum = self.kept = self.draw = nothing
        self.scale: Tensor | None = None  # what weight decay has left of p; None: all
        self.grown: Factors | None = None
        self.moved = False  # since the last fold
        self.place = slice(0)  # the columns of this step, whose free factor is `draw`
        self._acting: Factors | None = None  # what the module's output is changed by, x inner outer^T
        self._pair: Factors | None = None  # by how much more for the first half of a batch, and less for the second
        if self.module is None:
            self.hook = None
        else:  # first of all hooks: before FSDP takes the weights away, before a tensor-parallel layer makes its output local
            self.hook = self.module.register_forward_hook(self._add_to_output, prepend=True)

    @property
    def shape(self) -> tuple[int, int]:
        if self.p is None:
            layer: Any = self.module
            return layer.out_features, layer.in_features
        return self.p.shape[0], self.p.shape[1]

    @property
    def device(self) -> torch.device:
        if self.p is None:
            return next(t.device for t in (*self.module.parameters(), *self.module.buffers()))  # type: ignore[union-attr]
        return self.p.device

    @property
    def sizes(self) -> tuple[int, int]:
        """(rows of the basis, rows of the free factor)."""
        m, n = self.shape
        return (n, m) if self.right else (m, n)

    def begin(self, basis: Tensor) -> None:
        """Start a period with the basis (sizes[0], rank)."""
        fixed, free = self.sizes
        self.basis = basis.new_zeros(fixed, self.rank + self.extra)
        self.basis[:, : self.rank] = basis
        self.free = basis.new_zeros(free, self.rank + self.extra)
        self.sums = basis.new_zeros(free, self.rank)
        self._acting = None

    def choose(self, place: slice, generator: torch.Generator) -> None:
        """Draw this step's free factor for the columns `place`."""
        self.place = place
        width = len(range(*place.indices(self.rank + self.extra)))
        self.draw = torch.randn(self.sizes[1], width, generator=generator).to(self.device)

    def factors(self, place: slice, free: Tensor) -> Factors:
        """L, R of some columns of the basis and a free factor (., k)."""
        basis = self.basis[:, place]
        return (free, basis) if self.right else (basis, free)

    def product(self, place: slice, free: Tensor) -> Tensor:
        """L R^T (m, n), sharded as p is."""
        left, right = self.factors(place, free)
        whole = left @ right.T
        return whole if self.p is None else placed_like(whole, self.p)

    def perturb(self, amount: float, *, paired: bool = False) -> None:
        """From here on act as p + amount Z, beside the change so far (`paired`: for the first half of a batch, and as p - amount Z for
        the second); 0 ends it, of what is not done in place."""
        if self.module is None:
            assert self.p is not None
            self.p.add_(self.product(self.place, self.draw).to(self.p.dtype), alpha=amount)
            return
        free, changed = self.free, self.moved
        self._pair = self.ordered(self.factors(self.place, amount * self.draw)) if amount and paired else None
        if amount and not paired:
            free, changed = free.clone(), True
            free[:, self.place] += amount * self.draw
        self._acting = self.ordered(self.factors(slice(None), free)) if changed else None

    def move(self, lr: float, step: Tensor, decay: float) -> None:
        """p <- (1 - lr decay) p - lr step b^T with the basis columns b of this step; `step` is like `draw`."""
        if self.module is None:
            assert self.p is not None
            self.p.mul_(1 - lr * decay)
            self.p.add_(self.product(self.place, step).to(self.p.dtype), alpha=-lr)
            return
        if decay:
            self.scale = (torch.ones((), dtype=torch.float64) if self.scale is None else self.scale) * (1 - lr * decay)
            self.free *= 1 - lr * decay
        self.free[:, self.place] -= lr * step
        self.moved = True
        self.perturb(0.0)

    def fold(self, generator: torch.Generator) -> None:
        """Put the change into p, 16-bit ones by stochastic rounding, or into `grown`."""
        if self.module is None or not self.moved:
            return
        p = self.p
        if p is not None:
            change = self.product(slice(None), self.free)
            scale = 1.0 if self.scale is None else float(self.scale)
            if p.element_size() < 4:
                draw = placed_like(torch.rand(p.shape, generator=generator).to(p.device), p)
                local(p).copy_(stochastic_rounding(scale * local(p).float() + local(change), local(draw), p.dtype))
            else:
                p.mul_(scale).add_(change.to(p.dtype))
        if self.adapter_rank is not None:
            left, right = self.factors(slice(None), self.free)
            self.grown = sum_of(self.grown, (left.clone(), right.clone()), self.adapter_rank)
        self.free.zero_()
        self.scale = self._acting = None
        self.moved = False

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved()` of a matrix like this one."""
        for part in PARTS:
            setattr(self, part, saved[part].to(self.device, copy=True))
        self.right, self.moved, self.scale = saved["right"], saved["moved"], saved["scale"]
        self.grown = tuple(factor.to(self.device, copy=True) for factor in saved["grown"]) or None
        if self.module is not None and len(self.basis):
            self.perturb(0.0)

    def saved(self) -> dict[str, Any]:
        """Tensors, numbers and strings alone."""
        facts = {
            "name": self.name,
            "right": self.right,
            "moved": self.moved,
            "scale": self.scale,
            "grown": list(self.grown or ()),
        }
        return {**facts, **{part: getattr(self, part) for part in PARTS}}

    def ordered(self, factors: Factors) -> Factors:
        """(inner, outer), for x inner outer^T."""
        left, right = factors
        return (left, right) if isinstance(self.module, Conv1D) else (right, left)

    def _add_to_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x = args[0]
        if self.scale is not None:
            bias: Any = getattr(module, "bias", None)
            output = self.scale * output if bias is None else self.scale * (output - bias) + bias
        if self.p is None and self.grown is not None:
            output = output + _through(x, self.ordered(self.grown)).to(output.dtype)
        if self._acting is not None:
            output = output + _through(x, self._acting).to(output.dtype)
        if self._pair is not None:
            if len(x) % 2:
                raise ValueError(f"'{self.name}' has an input of {len(x)} rows, which are no two halves: see `doubled`")
            half, part = len(x) // 2, _through(x, self._pair).to(output.dtype)
            output = output + torch.cat([part[:half], -part[half:]])
        return output


def _through(x: Tensor, factors: Factors) -> Tensor:
    """x inner outer^T."""
    inner, outer = (factor.to(x.dtype) for factor in factors)
    if isinstance(x, DTensor):  # in a tensor-parallel layer
        whole = [Replicate()] * x.device_mesh.ndim
        inner, outer = (DTensor.from_local(factor, x.device_mesh, whole, run_check=False) for factor in (inner, outer))
    return (x @ inner) @ outer.T


@dataclass(eq=False)
class Noisy:
    """A parameter that is perturbed in place by Gaussian noise of its own size.

    With `exact`, its value lies aside meanwhile, in float32 or better; without, noise is taken back as it was put there, to rounding.
    """

    name: str
    p: nn.Parameter
    group: dict[str, Any]
    aside: bool = True

    def __post_init__(self) -> None:
        kind = torch.promote_types(self.p.dtype, torch.float32)
        self.exact = self.p.detach().to(kind, copy=True) if self.aside else None

    def draw(self, generator: torch.Generator) -> Tensor:
        """Noise, the same for every process, sharded as p is."""
        z = torch.randn(self.p.shape, generator=generator, dtype=torch.promote_types(self.p.dtype, torch.float32))
        return placed_like(z.to(self.p.device), self.p)

    def perturb(self, amount: float, z: Tensor) -> None:
        if self.exact is None:
            self.p.add_(z.to(self.p.dtype), alpha=amount)
        else:
            self.p.copy_(self.exact + amount * z)

    def settle(self, amount: float, z: Tensor) -> None:
        """End what `perturb` did with the same arguments."""
        if self.exact is None:
            self.p.sub_(z.to(self.p.dtype), alpha=amount)
        else:
            self.p.copy_(self.exact)

    def move(self, lr: float, step: Tensor, decay: float) -> None:
        """p <- (1 - lr decay) p - lr step."""
        (self.p if self.exact is None else self.exact).mul_(1 - lr * decay).sub_(lr * step)
        if self.exact is not None:
            self.p.copy_(self.exact)

    def saved(self) -> dict[str, Any]:
        """The name, and the exact value in full, whatever of it this process has."""
        exact = self.exact.full_tensor() if isinstance(self.exact, DTensor) else self.exact
        return {"name": self.name, "exact": exact}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved()`."""
        if self.exact is not None:
            self.exact = placed_like(saved["exact"].to(self.p.device, copy=True), self.p)
