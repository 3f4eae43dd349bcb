"""Layers with one bit a weight and an activation, in the place of torch's: `acclimate.compress.surge` says what they are for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from acclimate.compress.binary_gradients import (
    BinaryFunction,
    Convolution,
    Inputs,
    Pass,
    SurgeConfig,
    Tally,
    output,
    rectified,
    sign,
)


class BinaryLayer(nn.Module):
    """What the binary layers share; `weight` and `bias` are those of the torch layer that comes after it in the order of classes."""

    weight: Any
    bias: Any
    aux_weight: nn.Parameter | None

    def set_up(self, config: SurgeConfig) -> None:
        """Take the configuration, and make what it asks for beside the weight: W_a, alpha, and an elastic activation's scale and threshold."""
        self.config, self.progress, self.tally = config, 0.0, Tally()
        rows = self.weight.flatten(1)
        kind, _, rank = (config.aux or "").partition(":")
        if rank and int(rank) > min(rows.shape):
            raise ValueError(f"lowrank:{rank} is more than the {min(rows.shape)} of a {tuple(rows.shape)} layer")
        if config.beta and config.activation != "sign" and not isinstance(self, nn.Linear):
            raise ValueError(
                "beta='mean' with elastic activations is for linear layers: a window has no scale of its own"
            )
        self.aux_weight = nn.Parameter(self.weight.detach().clone()) if kind == "copy" else None
        if rank:  # the best of that rank
            U, s, Vt = torch.linalg.svd(rows.detach().float(), full_matrices=False)
            root = s[: int(rank)].sqrt()
            self.aux_left = nn.Parameter((U[:, : int(rank)] * root).to(rows.dtype))
            self.aux_right = nn.Parameter((root[:, None] * Vt[: int(rank)]).to(rows.dtype))
        self.alpha = nn.Parameter(self._mean(self.weight.detach())) if config.alpha == "learned" else None
        self.input_scale = self.threshold = None
        if config.activation != "sign":
            # of half-normal to exponential inputs with mean 1, the best two values are 0 and 1.5 to 2
            start = 2.0 if config.activation == "elastic01" and config.beta else 1.0
            self.input_scale = nn.Parameter(rows.new_full((1,), start))
            self.threshold = nn.Parameter(rows.new_zeros(1))
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

    def tokens(self, x: Tensor, op: Convolution) -> Tensor | None:
        """What outputs are multiplied with besides alpha, or None."""
        return op.mean_input(x.detach(), self.weight.detach()) if self.config.beta else None

    def operation(self) -> Convolution:
        raise NotImplementedError

    def cropped(self, y: Tensor) -> Tensor:
        """The layer's outputs out of those of `operation`."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__} takes floating point inputs, got {x.dtype}")
        op = self.operation()
        if x.ndim < max(2, op.dimensions + 2):  # one sample, without an axis for the batch
            return self.forward(x[None])[0]
        latent = self.latent()
        aux = self.auxiliary() if torch.is_grad_enabled() else None
        parts: list[Any] = [latent, self.scale(latent), aux, self.bias, self.input_scale, self.threshold]
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # the Function is opaque to it
            x = x.to(torch.get_autocast_dtype(kind))
            parts = [None if part is None else part.to(x.dtype) for part in parts]
        tokens = self.tokens(x, op)
        how = Pass(
            op, self.config, self.progress, getattr(self, "ratio", None), self.tally if self.tally.watch else None
        )
        if torch.is_grad_enabled():
            found: Tensor = BinaryFunction.apply(x, *parts, tokens, how)
            return self.cropped(found)
        weight, scale, _, bias, input_scale, threshold = parts
        inputs = Inputs(self.config.activation, input_scale, threshold, tokens)
        return self.cropped(output(op, inputs, x, sign(weight), scale, bias))

    def start_from(self, x: Tensor) -> None:
        """Set an elastic activation's scale by inputs like those to come."""
        if self.input_scale is not None and not self.config.beta:
            factor = 2.0 if self.config.activation == "elastic01" else 1.0
            self.input_scale.data.fill_(factor * x.abs().mean())

    def strip(self) -> None:
        """Drop W_a."""
        self.aux_weight = None
        for name in ("aux_left", "aux_right", "ratio"):
            if hasattr(self, name):
                delattr(self, name)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # a checkpoint of the ordinary layer: what stands beside the weight starts from it, as in a new layer
        weight = state.get(f"{prefix}weight")
        if weight is not None:
            starts = {"aux_weight": weight, "alpha": self._mean(weight)}
            starts |= {name: getattr(self, name) for name in ("input_scale", "threshold")}
            for name, start in starts.items():
                if getattr(self, name) is not None:
                    state.setdefault(f"{prefix}{name}", start.detach())
        super()._load_from_state_dict(state, prefix, *args)


class BinaryLinear(BinaryLayer, nn.Linear):
    """nn.Linear with one bit a weight and an activation; arguments as there, and `config`."""

    def __init__(self, *args: Any, config: SurgeConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_up(config or SurgeConfig())

    def operation(self) -> Convolution:
        return Convolution(0)


class _BinaryConvolution(BinaryLayer):
    def __init__(self, *args: Any, config: SurgeConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        if layer.padding_mode != "zeros":
            raise TypeError(f"binary convolutions pad with zeros, not '{layer.padding_mode}'")
        self.set_up(config or SurgeConfig())

    def _pads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The padding of both ends, and how many of the first outputs are too many.

        "same" of an even kernel is one wider at the end: both ends are padded so and the first output is dropped, as zeros are no signs.
        """
        layer: Any = self
        if not isinstance(layer.padding, str):
            return layer.padding, (0,) * len(layer.kernel_size)
        widths = layer._reversed_padding_repeated_twice
        before, after = widths[-2::-2], widths[::-2]
        return tuple(after), tuple(b - a for a, b in zip(before, after, strict=True))

    def operation(self) -> Convolution:
        layer: Any = self
        return Convolution(len(layer.kernel_size), layer.stride, self._pads()[0], layer.dilation, layer.groups)

    def cropped(self, y: Tensor) -> Tensor:
        extras = self._pads()[1]
        for axis, extra in enumerate(extras, start=-len(extras)):
            y = y.narrow(axis, extra, y.shape[axis] - extra) if extra else y
        return y


class BinaryConv1d(_BinaryConvolution, nn.Conv1d):
    """nn.Conv1d with one bit a weight and an activation; arguments as there, and `config`."""


class BinaryConv2d(_BinaryConvolution, nn.Conv2d):
    """nn.Conv2d with one bit a weight and an activation; arguments as there, and `config`."""


KINDS: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Linear: BinaryLinear,
    nn.Conv1d: BinaryConv1d,
    nn.Conv2d: BinaryConv2d,
}


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
        made = KINDS[type(layer)](
            layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups,
            padding_mode=layer.padding_mode, **where,
        )  # fmt: skip
    made.weight, made.bias = layer.weight, layer.bias
    made.set_up(config)
    made.train(layer.training)
    return made
