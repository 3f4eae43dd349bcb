"""The mathematics of binary layers: signs and what stands in for their derivatives, elastic activations, and SURGE's compensated gradient.

`acclimate.compress.surge` says what they are for; `binary_modules` has the layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

Estimator = Literal["ste", "bireal", "ede"]
Scaler = Literal["batch", "sample", "ema", "fixed"]
Activation = Literal["sign", "elastic", "elastic01"]

TINY = 1e-8  # beside ||g_a||, and below what is divided by
EMA = 0.9


@dataclass(frozen=True)
class SurgeConfig:
    """How layers are made binary and how their gradients are estimated.

    Parameters
    ----------
    estimator
        "ste", "bireal" (triangular) or "ede" (a tanh that sharpens as training goes on, see `set_progress`), for activations and weights.
    eta
        Size of the helping gradient next to the binary one's.
    ags
        lambda = eta ||g_b|| / ||g_a|| of the "batch", of each "sample", or with an "ema" of the ratio; "fixed": lambda = eta.
    aux
        W_a: "copy" of W, "shared" with it, "lowrank:r", or None for the estimator alone.
    alpha
        "mean": of |W|, a constant to the gradient; "learned"; None: 1.
    beta
        "mean": outputs are multiplied with the mean |x| of what led to them, a constant to the gradient (XNOR-Net's K; of each token, for a
        linear layer); None: they are not.
    activation
        "sign", or "elastic" (two values -a and a) or "elastic01" (0 and a) around a threshold t, with a and t learned (BiT).
    nonnegative
        For `binarize`, with activation="elastic": regular expressions of layers whose inputs are not negative, which get "elastic01".
    rectify
        ReCU: W standardised for each output and clamped to its quantiles 1 - tau and tau; a number, or (first, last) over training.
    clip_latent
        W is kept in [-clip_latent, clip_latent] after each step (`clip_latent_`, which `SurgeCallback` calls); None: it is not.
    ags_sync
        Norms over all processes.
    skip
        Regular expressions: layers whose names match stay as they are.
    skip_ends
        The first convolution, the last linear layer and 1 x 1 convolutions stay, too.
    """

    estimator: Estimator = "ste"
    eta: float = 0.3
    ags: Scaler = "batch"
    aux: str | None = "copy"
    alpha: Literal["mean", "learned"] | None = "mean"
    beta: Literal["mean"] | None = None
    activation: Activation = "sign"
    nonnegative: tuple[str, ...] = ()
    rectify: float | tuple[float, float] | None = None
    clip_latent: float | None = 1.5
    ags_sync: bool = False
    skip: tuple[str, ...] = ()
    skip_ends: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("estimator", self.estimator, get_args(Estimator)),
            ("ags", self.ags, get_args(Scaler)),
            ("alpha", self.alpha, ("mean", "learned", None)),
            ("beta", self.beta, ("mean", None)),
            ("activation", self.activation, get_args(Activation)),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")
        if not self.eta >= 0:
            raise ValueError(f"eta must not be below 0, got {self.eta}")
        if self.aux not in ("copy", "shared", None) and not re.fullmatch(r"lowrank:[1-9]\d*", str(self.aux)):
            raise ValueError(f"aux is 'copy', 'shared', 'lowrank:r' with r >= 1, or None, not {self.aux!r}")
        if self.nonnegative and self.activation != "elastic":
            raise ValueError(f"nonnegative goes with activation='elastic', not {self.activation!r}")
        ends = self.rectify if isinstance(self.rectify, tuple) else (self.rectify,)
        if any(tau is not None and not 0.5 < tau <= 1 for tau in ends):
            raise ValueError(f"rectify is between 0.5 and 1, got {self.rectify}")


# --- signs ---


def sign(x: Tensor) -> Tensor:
    """-1 or 1; 1 at zero."""
    return x.sign().add_(0.5).sign_()  # several times as fast as torch.where on a CPU


def through(g: Tensor, x: Tensor, estimator: Estimator, progress: float = 0.0) -> Tensor:
    """What an estimator passes back of g = dL/d sign(x) to x; `progress` in [0, 1] is that of training.

    g 1[|x| <= 1] for "ste"; g max(0, 2 - 2 |x|) for "bireal"; g t k (1 - tanh^2(t x)), t = 10^(2 progress - 1), k = max(1 / t, 1), for "ede".
    """
    if estimator == "ste":
        # one pass over memory; its bounds are open, so they are the numbers next to -1 and 1
        bound = 1 + torch.finfo(x.dtype).eps
        passed: Tensor = torch.ops.aten.hardtanh_backward(g, x, -bound, bound)
        return passed
    if estimator == "bireal":
        return x.abs().mul_(-2).add_(2).clamp_min_(0).mul_(g)
    t = 10 ** (2 * progress - 1)
    return (1 - torch.tanh(t * x).square()).mul_(max(1 / t, 1.0) * t).mul_(g)


def rectified(weight: Tensor, tau: float) -> Tensor:
    """ReCU's W: standardised for each output, and clamped to its 1 - tau and tau quantiles."""
    rows = weight.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True).clamp_min(TINY)
    low, high = torch.quantile(
        rows.detach().float(), torch.tensor([1 - tau, tau], device=rows.device), dim=1, keepdim=True
    ).to(rows)
    return rows.clamp(low, high).view_as(weight)


# --- activations ---


@dataclass(frozen=True)
class Inputs:
    """Q, what becomes of a layer's inputs x: a number a times B(x), which has two whole values. tokens s: what outputs are multiplied with, or None.

    "sign": B(x) = sign(x), a = 1. The elastic ones learn the scale a and a threshold t; with u = (x - t) / (a s)

        "elastic":    B = sign(u)                            "elastic01":  B = 1[u >= 1/2] = (1 + sign(2 u - 1)) / 2

    for linear layers with one s a token; s is 1 for others. The sign's derivative is the estimator's m, of u or of 2 u - 1; so what the
    gradient sees of Q is a clip(u, -1, 1), or a clip(u, 0, 1), for "ste". For g = dL/dQ, s again apart, that makes

        dL/dx = g m / s        dL/dt = - sum g m / s        dL/da = sum g (B - u m)
    """

    kind: Activation = "sign"
    scale: Tensor | None = None
    threshold: Tensor | None = None
    tokens: Tensor | None = None

    def _place(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        assert self.threshold is not None
        return (x - self.threshold).div_(self.scale if self.tokens is None else self.scale * self.tokens)

    def __call__(self, x: Tensor) -> Tensor:
        """B(x)."""
        if self.kind == "sign":
            return sign(x)
        u = self._place(x)
        return sign(u) if self.kind == "elastic" else sign(u.sub_(0.5)).add_(1).div_(2)

    def backward(
        self, g: Tensor, x: Tensor, estimator: Estimator, progress: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dL/dx, dL/da (1,) and dL/dt (1,) for dL/dQ = g."""
        if self.kind == "sign":
            return through(g, x, estimator, progress), None, None
        u = self._place(x)
        passed = through(g, u if self.kind == "elastic" else 2 * u - 1, estimator, progress)
        of_scale = (g * self(x)).sum() - (passed * u).sum()
        of_input = passed if self.tokens is None else passed / self.tokens
        return of_input, of_scale.view(1), -of_input.sum().view(1)


# --- the layer's operation ---


@dataclass(frozen=True)
class Convolution:
    """op and its gradients. `dimensions` 0 is a linear layer."""

    dimensions: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.dimensions:
            return F.linear(x, weight, bias)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, (0,) * self.dimensions, self.groups
        )

    def gradients(self, d: Tensor, x: Tensor, weight: Tensor, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
        """dL/dx and, if wanted, dL/dweight of op(x, weight), for dL/dy = d."""
        if not self.dimensions:
            found = d.flatten(0, -2).T @ x.flatten(0, -2) if needs_weight else None
            return d @ weight, found
        of_input, of_weight, _ = torch.ops.aten.convolution_backward(
            d, x, weight, None, self.stride, self.padding, self.dilation, False, (0,) * self.dimensions, self.groups,
            (True, needs_weight, False),
        )  # fmt: skip
        return of_input, of_weight

    def bias_gradient(self, d: Tensor) -> Tensor:
        """(outputs,) of d."""
        return d.sum((0, *range(2, d.ndim))) if self.dimensions else d.flatten(0, -2).sum(0)

    def mean_input(self, x: Tensor, weight: Tensor) -> Tensor:
        """Mean |x| of what leads to each output, shaped to multiply outputs.

        Linear: (..., 1), of each token. Convolution (B, C, ..): |x| averaged over the channels of a group, then over the window, zeros of the
        padding included: (B, 1 or outputs, ..).
        """
        if not self.dimensions:
            return x.abs().mean(-1, keepdim=True).clamp_min(TINY)
        channels = x.abs().unflatten(1, (self.groups, -1)).mean(2)
        window = channels.new_full((self.groups, 1, *weight.shape[2:]), 1 / weight[0, 0].numel())
        means = self(channels, window, None)
        return means if self.groups == 1 else means.repeat_interleave(len(weight) // self.groups, 1)


# --- SURGE ---


@dataclass
class Tally:
    """What a layer tells of its last backward pass; filled where `watch` is set."""

    watch: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)  # lambda, ||g_b||, ||g_a||, their cosine
    passes: int = 0
    dead: int = 0  # passes without a binary gradient, or with one that is not finite

    def note(self, lam: Tensor, g_b: Tensor, g_a: Tensor) -> None:
        norm_b, norm_a = sample_norms(g_b).norm(), sample_norms(g_a).norm()
        self.values = {
            "lambda": lam.mean(), "norm_b": norm_b, "norm_a": norm_a,
            "cosine": (g_b.float() * g_a.float()).sum() / (norm_b * norm_a + TINY),
        }  # fmt: skip
        self.passes += 1
        self.dead += int(not (norm_b > 0 and norm_b.isfinite()))


def sample_norms(g: Tensor) -> Tensor:
    """(B,) norms of (B, ..), in float32 or better. One a sample: a single sum over millions of squares would lose digits."""
    return torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.promote_types(g.dtype, torch.float32))


def compensation(g_b: Tensor, g_a: Tensor, eta: float, ags: Scaler, ratio: Tensor | None, sync: bool) -> Tensor:
    """lambda, broadcastable to g_a: () or (B, 1, ..). `ratio` () is the moving average of ags="ema", brought up to date."""
    if ags == "fixed":
        return torch.full((), eta, device=g_a.device)
    norms = torch.stack([sample_norms(g) for g in (g_b, g_a)])  # (2, B)
    if ags == "sample":
        norms = norms.view(2, -1, *[1] * (g_a.ndim - 1))
    else:
        squares = norms.square().sum(1)
        if sync and dist.is_initialized():
            dist.all_reduce(squares)
        norms = squares.sqrt()
    found = norms[0] / (norms[1] + TINY)
    found = torch.where(found.isfinite(), found, torch.zeros_like(found))
    if ags == "ema":
        assert ratio is not None
        ratio.copy_(torch.where(ratio == 0, found, EMA * ratio + (1 - EMA) * found))
        found = ratio.clone()
    return eta * found


@dataclass(frozen=True)
class Pass:
    """What a layer's pass goes by that takes no gradient."""

    op: Convolution
    config: SurgeConfig
    progress: float
    ratio: Tensor | None
    tally: Tally | None


def output(op: Convolution, inputs: Inputs, x: Tensor, signs: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """op(B(x), signs) a scale s + bias, the binary layer.

    The product is one of whole numbers, so it is exact: where it is 0, what comes after sees 0, on every machine and for every batch.
    """
    factor = scale.view(-1, *[1] * op.dimensions)
    y = op(inputs(x), signs, None).mul_(factor if inputs.scale is None else factor * inputs.scale)
    if inputs.tokens is not None:
        y.mul_(inputs.tokens)
    return y if bias is None else y.add_(bias.view(-1, *[1] * op.dimensions))


class BinaryFunction(torch.autograd.Function):
    """The layer: binary forward, compensated backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        aux: Tensor | None,
        bias: Tensor | None,
        input_scale: Tensor | None,
        threshold: Tensor | None,
        tokens: Tensor | None,
        how: Pass,
    ) -> Tensor:
        ctx.how, ctx.has_bias = how, bias is not None
        ctx.save_for_backward(x, weight, scale, aux, input_scale, threshold, tokens)
        inputs = Inputs(how.config.activation, input_scale, threshold, tokens)
        return output(how.op, inputs, x, sign(weight), scale, bias)

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        x, weight, scale, aux, input_scale, threshold, tokens = ctx.saved_tensors
        how: Pass = ctx.how
        op, config, progress = how.op, how.config, how.progress
        inputs = Inputs(config.activation, input_scale, threshold, tokens)
        signs = sign(weight)
        g, of_weight = op.gradients(d if tokens is None else d * tokens, inputs(x), scale * signs, True)
        assert of_weight is not None
        if input_scale is not None:
            of_weight.mul_(input_scale)
        g_b, of_input_scale, of_threshold = inputs.backward(g, x, config.estimator, progress)
        of_scale = (of_weight * signs).flatten(1).sum(1).view_as(scale) if ctx.needs_input_grad[2] else None
        of_weight = through(of_weight.mul_(scale), weight, config.estimator, progress)
        of_input, of_aux = g_b, None
        if aux is not None and config.eta:
            g_a, of_aux = op.gradients(d, x, aux, ctx.needs_input_grad[3])
            lam = compensation(g_b, g_a, config.eta, config.ags, how.ratio, config.ags_sync)
            of_input = torch.addcmul(g_b, g_a, lam.to(g_a.dtype))
            if of_aux is not None and config.ags == "sample":  # each row's gradient has its own lambda
                of_aux = op.gradients((lam.view(-1, *[1] * (d.ndim - 1)) * d).to(d.dtype), x, aux, True)[1]
            elif of_aux is not None:
                of_aux.mul_(lam)
            if how.tally is not None:
                how.tally.note(lam, g_b, g_a)
        of_bias = op.bias_gradient(d) if ctx.has_bias else None
        return of_input, of_weight, of_scale, of_aux, of_bias, of_input_scale, of_threshold, None, None
