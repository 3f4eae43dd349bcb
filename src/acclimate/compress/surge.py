"""Train networks whose weights and activations are one bit each, with a learned full-precision help for the gradient that inference never sees.

A binary layer computes y = op(sign(x), alpha sign(W)), op a convolution or a matrix product, alpha = mean |W| of each output's inputs. sign has
no useful derivative, so training replaces it by a mask: of a straight-through estimator 1[|x| <= 1], and so on. That is biased, and blind
outside of [-1, 1]. SURGE adds, in the backward pass alone, the gradient of a full-precision layer with weights W_a; for dL/dy = d,

    g_b = op'(d, alpha sign W) mask(x)      g_a = op'(d, W_a)      lambda = eta ||g_b|| / ||g_a||
    dL/dx = g_b + lambda g_a      dL/dW = op'_W(d, sign x) alpha mask(W)      dL/dW_a = lambda op'_W(d, x)

which is the gradient of f_b - stop(lambda f_a) + lambda f_a, a function whose value is f_b: f_a is never computed, outputs are bit for bit those
of the binary layer, and `strip_aux` removes W_a without a trace. It costs two more products in the backward pass (5/3 of a step; 4/3 with
aux="shared", whose W_a is W itself).

Scale: ordinary parameters, so DDP, FSDP2, accumulation and checkpointing work as for any layer; lambda is of each process's own batch unless
`ags_sync`, which all-reduces two numbers a layer.

Source: "SURGE: Surrogate Gradient Adaptation in Binary Neural Networks", arXiv 2605.10989 (ICML 2026). Estimators: STE, arXiv 1602.02830; Bi-Real,
arXiv 1808.00278; EDE of IR-Net, arXiv 1909.10788; ReCU, arXiv 2103.12369. aux "shared" and "lowrank:r", and the clip of W, are ours.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

Estimator = Literal["ste", "bireal", "ede"]
Scaler = Literal["batch", "sample", "ema", "fixed"]

TINY = 1e-8  # beside ||g_a||
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
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")
        if not self.eta >= 0:
            raise ValueError(f"eta must not be below 0, got {self.eta}")
        if self.aux not in ("copy", "shared", None) and not re.fullmatch(r"lowrank:[1-9]\d*", str(self.aux)):
            raise ValueError(f"aux is 'copy', 'shared', 'lowrank:r' with r >= 1, or None, not {self.aux!r}")
        ends = self.rectify if isinstance(self.rectify, tuple) else (self.rectify,)
        if any(tau is not None and not 0.5 < tau <= 1 for tau in ends):
            raise ValueError(f"rectify is between 0.5 and 1, got {self.rectify}")


# --- the mathematics ---


def sign(x: Tensor) -> Tensor:
    """-1 or 1; 1 at zero."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def mask(x: Tensor, estimator: Estimator, progress: float = 0.0) -> Tensor:
    """What stands in for the derivative of sign at x; `progress` in [0, 1] is that of training."""
    if estimator == "ste":
        return (x.abs() <= 1).to(x.dtype)
    if estimator == "bireal":
        return (2 - 2 * x.abs()).clamp_min(0)
    t = 10 ** (2 * progress - 1)
    return max(1 / t, 1.0) * t * (1 - torch.tanh(t * x).square())


def rectified(weight: Tensor, tau: float) -> Tensor:
    """ReCU's W: standardised for each output, and clamped to its 1 - tau and tau quantiles."""
    rows = weight.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True).clamp_min(TINY)
    low, high = torch.quantile(
        rows.detach().float(), torch.tensor([1 - tau, tau], device=rows.device), dim=1, keepdim=True
    ).to(rows)
    return rows.clamp(low, high).view_as(weight)


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


@dataclass
class Tally:
    """What a layer tells of its last backward pass; filled where `watch` is set."""

    watch: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)  # lambda, ||g_b||, ||g_a||, their cosine
    passes: int = 0
    dead: int = 0  # passes without a binary gradient, or with one that is not finite


def compensation(g_b: Tensor, g_a: Tensor, eta: float, ags: Scaler, ratio: Tensor | None, sync: bool) -> Tensor:
    """lambda, broadcastable to g_a: () or (B, 1, ..). `ratio` () is the moving average of ags="ema", brought up to date."""
    if ags == "fixed":
        return torch.full((), eta, device=g_a.device)
    axes = tuple(range(1 if ags == "sample" else 0, g_a.ndim))
    squares = torch.stack([g.float().square().sum(axes, keepdim=ags == "sample") for g in (g_b, g_a)])
    if sync and ags != "sample" and dist.is_initialized():
        dist.all_reduce(squares)
    norm_b, norm_a = squares.sqrt()
    found = norm_b / (norm_a + TINY)
    found = torch.where(found.isfinite(), found, torch.zeros_like(found))
    if ags == "ema":
        assert ratio is not None
        ratio.copy_(torch.where(ratio == 0, found, EMA * ratio + (1 - EMA) * found))
        found = ratio.clone()
    return eta * found


class _Binary(torch.autograd.Function):
    """The layer: binary forward, compensated backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        aux: Tensor | None,
        bias: Tensor | None,
        op: Convolution,
        how: tuple[Any, ...],
    ) -> Tensor:
        ctx.op, ctx.how, ctx.has_bias = op, how, bias is not None
        ctx.save_for_backward(x, weight, scale, aux)
        return op(sign(x), scale * sign(weight), bias)

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        x, weight, scale, aux = ctx.saved_tensors
        config, progress, ratio, tally = ctx.how
        op: Convolution = ctx.op
        signs = sign(weight)
        g_b, g_w = op.gradients(d, sign(x), scale * signs, True)
        assert g_w is not None
        g_b = g_b * mask(x, config.estimator, progress)
        of_scale = (g_w * signs).flatten(1).sum(1).view_as(scale) if ctx.needs_input_grad[2] else None
        of_weight = g_w * scale * mask(weight, config.estimator, progress)
        of_input, of_aux = g_b, None
        if aux is not None and config.eta:
            g_a, of_aux = op.gradients(d, x, aux, ctx.needs_input_grad[3])
            lam = compensation(g_b, g_a, config.eta, config.ags, ratio, config.ags_sync)
            of_input = g_b + (lam * g_a).to(g_b.dtype)
            if of_aux is not None and config.ags == "sample":  # each row's gradient has its own lambda
                of_aux = op.gradients((lam.view(-1, *[1] * (d.ndim - 1)) * d).to(d.dtype), x, aux, True)[1]
            elif of_aux is not None:
                of_aux = (lam * of_aux).to(of_aux.dtype)
            if tally is not None:
                _note(tally, lam, g_b, g_a)
        of_bias = d.transpose(1, -1).flatten(0, -2).sum(0) if op.dimensions else d.flatten(0, -2).sum(0)
        return of_input, of_weight, of_scale, of_aux, of_bias if ctx.has_bias else None, None, None


def _note(tally: Tally, lam: Tensor, g_b: Tensor, g_a: Tensor) -> None:
    norm_b, norm_a = g_b.float().norm(), g_a.float().norm()
    tally.values = {
        "lambda": lam.mean(), "norm_b": norm_b, "norm_a": norm_a,
        "cosine": (g_b.float() * g_a.float()).sum() / (norm_b * norm_a + TINY),
    }  # fmt: skip
    tally.passes += 1
    tally.dead += int(not (norm_b > 0 and norm_b.isfinite()))


# --- layers ---


class BinaryLayer(nn.Module):
    """What the binary layers share; `weight` and `bias` are those of the torch layer that comes after it in the order of classes."""

    weight: Any
    bias: Any
    aux_weight: nn.Parameter | None

    def set_up(self, config: SurgeConfig) -> None:
        """Take the configuration, and make what it asks for beside the weight: W_a and alpha."""
        self.config, self.progress, self.tally = config, 0.0, Tally()
        rows = self.weight.flatten(1)
        kind, _, rank = (config.aux or "").partition(":")
        if rank and int(rank) > min(rows.shape):
            raise ValueError(f"lowrank:{rank} is more than the {min(rows.shape)} of a {tuple(rows.shape)} layer")
        self.aux_weight = nn.Parameter(self.weight.detach().clone()) if kind == "copy" else None
        if rank:  # the best of that rank
            U, s, Vt = torch.linalg.svd(rows.detach().float(), full_matrices=False)
            root = s[: int(rank)].sqrt()
            self.aux_left = nn.Parameter((U[:, : int(rank)] * root).to(rows.dtype))
            self.aux_right = nn.Parameter((root[:, None] * Vt[: int(rank)]).to(rows.dtype))
        self.alpha = nn.Parameter(self._mean(self.weight.detach())) if config.alpha == "learned" else None
        if config.ags == "ema":
            self.register_buffer("ratio", torch.zeros((), device=rows.device))

    def _mean(self, weight: Tensor) -> Tensor:
        """mean |W| over what leads to each output, shaped to multiply W."""
        return weight.abs().flatten(1).mean(1).view(-1, *[1] * (weight.ndim - 1))

    def latent(self) -> Tensor:
        """The weights whose signs count."""
        tau = self.config.rectify
        if tau is None:
            return self.weight
        first, last = tau if isinstance(tau, tuple) else (tau, tau)
        return rectified(self.weight, first + (last - first) * self.progress)

    def scale(self, latent: Tensor) -> Tensor:
        """alpha, shaped to multiply the weights."""
        if self.alpha is not None:
            return self.alpha
        return self._mean(latent.detach()) if self.config.alpha == "mean" else latent.new_ones([1] * latent.ndim)

    def auxiliary(self) -> Tensor | None:
        """W_a, or None."""
        if self.config.aux == "shared":
            return self.weight.detach()
        if hasattr(self, "aux_left"):
            return (self.aux_left @ self.aux_right).view_as(self.weight)
        return self.aux_weight

    def _apply_binary(self, x: Tensor, op: Convolution) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__} takes floating point inputs, got {x.dtype}")
        latent = self.latent()
        scale = self.scale(latent)
        if not torch.is_grad_enabled():
            return op(sign(x), scale * sign(latent), self.bias)
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # the Function is opaque to it
            dtype = torch.get_autocast_dtype(kind)
            x, latent, scale = x.to(dtype), latent.to(dtype), scale.to(dtype)
        aux, bias = self.auxiliary(), self.bias
        how = (self.config, self.progress, getattr(self, "ratio", None), self.tally if self.tally.watch else None)
        found: Tensor = _Binary.apply(
            x,
            latent,
            scale,
            None if aux is None else aux.to(x.dtype),
            None if bias is None else bias.to(x.dtype),
            op,
            how,
        )
        return found

    def strip(self) -> None:
        """Drop W_a."""
        self.aux_weight = None
        for name in ("aux_left", "aux_right", "ratio"):
            if hasattr(self, name):
                delattr(self, name)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # a checkpoint of the ordinary layer: W_a and alpha start from its weight, as in a new layer
        weight = state.get(f"{prefix}weight")
        if weight is not None and self.aux_weight is not None:
            state.setdefault(f"{prefix}aux_weight", weight)
        if weight is not None and self.alpha is not None:
            state.setdefault(f"{prefix}alpha", self._mean(weight))
        super()._load_from_state_dict(state, prefix, *args)


class BinaryLinear(BinaryLayer, nn.Linear):
    """nn.Linear with one bit a weight and an activation; arguments as there, and `config`."""

    def __init__(self, *args: Any, config: SurgeConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_up(config or SurgeConfig())

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_binary(x, Convolution(0))


class _BinaryConvolution(BinaryLayer):
    def __init__(self, *args: Any, config: SurgeConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        if layer.padding_mode != "zeros":
            raise TypeError(f"binary convolutions pad with zeros, not '{layer.padding_mode}'")
        self.set_up(config or SurgeConfig())

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        padding, more = layer.padding, [0] * len(layer.kernel_size)
        if isinstance(padding, str):
            # "same" of an even kernel is one wider at the end: pad both ends so and drop the first output (the pads are no signs)
            widths = layer._reversed_padding_repeated_twice
            padding = tuple(widths[::-2])
            more = [after - before for before, after in zip(widths[-2::-2], widths[::-2], strict=True)]
        op = Convolution(len(layer.kernel_size), layer.stride, padding, layer.dilation, layer.groups)
        found = self._apply_binary(x, op)
        for axis, extra in enumerate(more, start=-len(more)):
            found = found.narrow(axis, extra, found.shape[axis] - extra)
        return found


class BinaryConv1d(_BinaryConvolution, nn.Conv1d):
    """nn.Conv1d with one bit a weight and an activation; arguments as there, and `config`."""


class BinaryConv2d(_BinaryConvolution, nn.Conv2d):
    """nn.Conv2d with one bit a weight and an activation; arguments as there, and `config`."""


_KINDS: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Linear: BinaryLinear,
    nn.Conv1d: BinaryConv1d,
    nn.Conv2d: BinaryConv2d,
}


# --- models ---


def binarize(model: nn.Module, config: SurgeConfig | None = None) -> nn.Module:
    """Replace the convolutions and linear layers of `model` by binary ones with their weights, in place; returns the model.

    Layers that share a weight go on sharing it. A second call changes nothing and warns.

    Raises
    ------
    ValueError
        No layer is left to make binary. TypeError: a transposed, lazy or quantised layer that is not skipped (it is named).
    """
    config = config or SurgeConfig()
    if any(True for _ in binary_layers(model)):
        warnings.warn("the model has binary layers already: nothing is changed", stacklevel=2)
        return model
    chosen = _chosen(model, config)
    if not chosen:
        raise ValueError("there is no layer to make binary: all are skipped, or there is no Conv1d, Conv2d or Linear")
    made: dict[int, BinaryLayer] = {}
    weights: dict[int, BinaryLayer] = {}
    for name, layer in chosen:
        if id(layer) not in made:
            made[id(layer)] = binary = of_layer(layer, config)
            first = weights.setdefault(id(layer.weight), binary)
            if first is not binary:  # tied
                binary.weight, binary.aux_weight = first.weight, first.aux_weight
        model.set_submodule(name, made[id(layer)])
    return model


def _chosen(model: nn.Module, config: SurgeConfig) -> list[tuple[str, Any]]:
    """(name, layer) of what is made binary; a layer that is used in several places has several names."""
    known = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or "quantized" in type(module).__module__
    ]
    ends: set[int] = set()
    if config.skip_ends:
        once = list(dict.fromkeys(module for _, module in known))
        convolutions = [module for module in once if isinstance(module, nn.modules.conv._ConvNd)]
        linear = [module for module in once if isinstance(module, nn.Linear)]
        ends = {id(module) for module in [*convolutions[:1], *linear[-1:]]}
        ends |= {id(module) for module in convolutions if set(module.kernel_size) == {1}}
    chosen = []
    for name, module in known:
        if id(module) in ends or any(re.search(pattern, name) for pattern in config.skip):
            continue
        if type(module) not in _KINDS or not module.weight.is_floating_point() or module.weight.is_sparse:
            raise TypeError(f"'{name}' is a {type(module).__name__}, which cannot be made binary: name it in skip")
        chosen.append((name, module))
    return chosen


def of_layer(layer: Any, config: SurgeConfig) -> BinaryLayer:
    """The binary layer with the weights of an ordinary one, and its device and type."""
    # an empty shell: the weights are put in below, and what goes with them is made once they are there
    where = {
        "device": "meta",
        "dtype": layer.weight.dtype,
        "bias": layer.bias is not None,
        "config": SurgeConfig(aux=None),
    }
    if isinstance(layer, nn.Linear):
        made: Any = BinaryLinear(layer.in_features, layer.out_features, **where)
    else:
        made = _KINDS[type(layer)](
            layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups,
            padding_mode=layer.padding_mode, **where,
        )  # fmt: skip
    made.weight, made.bias = layer.weight, layer.bias
    made.set_up(config)
    made.train(layer.training)
    return made


def binary_layers(model: nn.Module) -> Iterator[tuple[str, BinaryLayer]]:
    """(name, layer) of the binary layers of a model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BinaryLayer))


def strip_aux(model: nn.Module) -> nn.Module:
    """Drop every W_a, in place; outputs stay bit for bit as they were."""
    for _, layer in binary_layers(model):
        layer.strip()
    return model


def set_progress(model: nn.Module, progress: float) -> None:
    """Tell the layers how far training is, from 0 to 1: what "ede" and a pair in `rectify` go by."""
    for _, layer in binary_layers(model):
        layer.progress = min(1.0, max(0.0, progress))


@torch.no_grad()
def clip_latent_(model: nn.Module) -> None:
    """Clip the weights behind the signs to what the layers' `clip_latent` says; call it after each step."""
    for _, layer in binary_layers(model):
        if layer.config.clip_latent is not None:
            layer.weight.clamp_(-layer.config.clip_latent, layer.config.clip_latent)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, and those that do not: W_a, alpha, biases and norms."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        spared = parameter.ndim < 2 or "aux_" in name or name.endswith("alpha")
        groups[spared].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


class SurgeCallback(TrainerCallback):
    """For transformers' Trainer: tells the layers the progress, clips after each step, and every `log_every` steps logs the mean lambda and
    cosine of g_b and g_a over the layers ("surge/lambda", "surge/cosine"), and how many had no binary gradient ("surge/dead_layers")."""

    def __init__(self, log_every: int = 50) -> None:
        self.log_every, self.warned = log_every, False

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        set_progress(model, state.global_step / max(1, state.max_steps))
        for _, layer in binary_layers(model):
            layer.tally.watch = (state.global_step + 1) % self.log_every == 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        clip_latent_(model)
        tallies = [layer.tally for _, layer in binary_layers(model) if layer.tally.watch and layer.tally.values]
        if not tallies:
            return
        dead = sum(tally.dead > tally.passes / 2 for tally in tallies)
        means = {key: float(torch.stack([t.values[key] for t in tallies]).mean()) for key in ("lambda", "cosine")}
        state.log_history.append(
            {"step": state.global_step, **{f"surge/{k}": v for k, v in means.items()}, "surge/dead_layers": dead}
        )
        if dead and not self.warned:
            self.warned = True
            warnings.warn(
                f"{dead} binary layers got no gradient in most steps, so nothing compensates them", stacklevel=2
            )
