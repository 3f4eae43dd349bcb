"""Posterior of LoRA factors as modules and as stacks: parameters, draws and KL."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from acclimate.adapters.bayesian_lora import inducing
from acclimate.adapters.bayesian_lora.config import BayesianLoraConfig

if TYPE_CHECKING:
    from acclimate.adapters.bayesian_lora.tuner import BayesianLoraLayer

START_NOISE = 1e-3  # of D, and of the published form's lambda and sigma


class FactorPosterior(nn.Module):
    """Posterior of one factor in wide form (r x n): A as it is, B transposed. a inducing rows, b inducing columns.

    Numbers, tied and diagonal: (a-r) r + (b-r) n + a + b + a b + 1.
    """

    def __init__(self, config: BayesianLoraConfig, n: int, which: Literal["A", "B"]) -> None:
        super().__init__()
        rows, columns = config.inducing_shape
        r, a, b = config.r, *((rows, columns) if which == "A" else (columns, rows))
        self.config, self.shape = config, (r, n, a, b)
        tied = config.parameterization == "tied"
        # published: the prior's scale goes by the columns of the factor as it stands in the layer
        self.scale = (
            math.sqrt(r / 3) / math.sqrt(a * b) if tied else config.prior_sd / math.sqrt(n if which == "A" else r)
        )
        start = inducing.FAMILIES[config.posterior].start(a, b, config.members)
        if tied:
            start |= {
                "extra_rank": 0.1 * torch.randn(max(a - r, 0), r),
                "extra_wide": 0.1 * torch.randn(max(b - r, 0), n),
                "strength": torch.zeros(()),
            }
        else:
            tiny = inducing.inverse_positive(START_NOISE)
            start = {
                key: torch.full_like(value, tiny) if key.startswith("sd") else value for key, value in start.items()
            }
            start |= {
                "rank_basis": torch.randn(a, r) / math.sqrt(a),
                "wide_basis": torch.randn(b, n) / math.sqrt(b),
                "mu": torch.randn(a, b)
                if which == "A"
                else torch.zeros(a, b),  # B = 0: training begins at the base model
                "strength": torch.full((), tiny),
            }
        if config.flow:
            start |= inducing.flow_start(b)
        noise = inducing.inverse_positive(START_NOISE)
        start |= {"rank_noise": torch.full((a,), noise), "wide_noise": torch.full((b,), noise)}
        for name, value in start.items():
            self.register_parameter(name, nn.Parameter(value))

    def frozen(self) -> Iterator[nn.Parameter]:
        """What is not trained: switched off, or not of the part that `train` names. Left trainable, DDP would wait for it."""
        config, tied = self.config, self.config.parameterization == "tied"
        for name, parameter in self.named_parameters():
            spread = name.startswith(("sd", "offsets", "strength"))
            off = (
                (config.max_sd == 0 and name.startswith("sd"))
                or (config.max_lambda == 0 and name == "strength")
                or (not config.random and tied)
            )
            other = (config.train == "mean" and (tied or spread)) or (
                config.train == "posterior" and name.startswith(("mu", "rank_basis", "wide_basis", "flow"))
            )
            if off or other:
                yield parameter


class Factor(NamedTuple):
    """One factor in a layer. `weight` (r, n) is the tied mean, None in the published form."""

    layer: BayesianLoraLayer
    which: Literal["A", "B"]
    posterior: FactorPosterior
    weight: Tensor | None


def full_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps autocast, on any device, out of a method: Cholesky factors have no half-precision form."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return method(*args, **kwargs)

    return call


class FactorStack:
    """Factors of one shape and configuration, computed together: G of them."""

    @full_precision
    def __init__(self, factors: list[Factor]) -> None:
        first = factors[0].posterior
        self.factors, self.config, self.scale = factors, first.config, first.scale
        self.names = [factor.layer.name for factor in factors]
        self.r, self.n, self.a, self.b = first.shape
        self.family = inducing.FAMILIES[self.config.posterior]
        self.raw = {
            name: torch.stack([getattr(factor.posterior, name).float() for factor in factors])
            if parameter.dtype in (torch.float16, torch.bfloat16)
            else torch.stack([getattr(factor.posterior, name) for factor in factors])
            for name, parameter in first.named_parameters()
        }
        tied = self.config.parameterization == "tied"
        to_scale = inducing.bounded if tied else inducing.clamped
        self.sd = to_scale(self.config.max_sd)
        self.strength = to_scale(self.config.max_lambda)(self.raw["strength"])
        self.weight: Tensor | None = None
        if tied:
            weight = torch.stack([factor.weight for factor in factors if factor.weight is not None])
            self.weight = weight.to(self.raw["strength"].dtype)
            unit = torch.eye(self.r, dtype=self.weight.dtype, device=weight.device)[: self.a].expand(
                len(factors), -1, -1
            )
            rank = torch.cat([unit, self.raw["extra_rank"]], 1)
            wide = torch.cat([self.weight.detach()[:, : self.b], self.raw["extra_wide"]], 1)
        else:
            rank, wide = self.raw["rank_basis"], self.raw["wide_basis"]
        self.rank = inducing.basis(rank, inducing.positive(self.raw["rank_noise"]), self.names)
        self.wide = inducing.basis(wide, inducing.positive(self.raw["wide_noise"]), self.names)

    def _pushed(self, value: Tensor) -> Tensor:
        """s P_r^T value P_c for values (G, a, b): (G, r, n)."""
        return self.scale * (self.rank.projection.mT @ value @ self.wide.projection)

    def _free_mean(self) -> Tensor:
        mu = self.raw["mu"]
        return inducing.flow(self.raw, mu[:, None])[0][:, 0] if self.config.flow else mu

    @full_precision
    def mean(self) -> Tensor:
        """(G, r, n)."""
        return self.weight if self.weight is not None else self._pushed(self._free_mean())

    @full_precision
    def draw(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """(G, draws, r, n)."""
        shape = (len(self.factors), draws, self.r, self.n, self.a, self.b)
        noise = inducing.draw_noise(shape, self.strength, generator)
        xi = noise.inducing[3]
        if self.config.flow:
            values, _ = inducing.flow(self.raw, self.raw["mu"][:, None] + self.sd(self.raw["sd"])[:, None] * xi)
            spread = values - self._free_mean()[:, None]
        else:
            spread = self.family.spread(self.raw, self.sd, xi, noise.member)
        off = inducing.matheron(self.rank, self.wide, spread, self.strength, self.scale, noise, self.names)
        return self.mean()[:, None] + off

    @full_precision
    def kl(self) -> tuple[Tensor, Tensor]:
        """(KL of the inducing values, KL of the conditional), each summed over the G factors.

        A spread that is switched off (`max_sd` or `max_lambda` 0) is a point: its infinite constant is left out.
        """
        if self.weight is not None:
            mu = self.rank.projection @ self.weight @ self.wide.projection.mT / self.scale
            outside = 0.5 * (self.weight - self._pushed(mu)).square().sum() / self.scale**2
        else:
            mu, outside = self.raw["mu"], self.strength.new_zeros(())
        if self.config.max_sd == 0:
            own = 0.5 * self._free_mean().square().sum() if self.weight is None else 0.5 * mu.square().sum()
        elif self.config.flow:
            xi = torch.randn((len(self.factors), 1, self.a, self.b), dtype=mu.dtype, device=mu.device)
            own = inducing.flow_kl(self.raw, self.sd(self.raw["sd"]), mu, xi).sum()
        else:
            own = self.family.kl(self.raw, self.sd, mu).sum()
        conditional = (
            inducing.conditional_kl(self.strength, self.r * self.n).sum()
            if self.config.max_lambda
            else own.new_zeros(())
        )
        return own + outside, conditional
