"""How large each row and column of a layer's weight gradient is, learned while the gradient is computed.

The gradient of a layer y = x W^T is G = D^T X, with the inputs X (T x n) and the output gradients D (T x m) of all T tokens. The sums

    s_j = sum_t |X_tj|^p        r_i = sum_t |D_ti|^q        1/p + 1/q = 1

bound it, G_ij^2 <= (r_i^(1/q) s_j^(1/p))^2 (Hoelder's inequality; Cauchy's for p = q = 2), with equality for one token.

How they are caught: the layer's output passes through a function that changes nothing, and whose backward pass returns (s, r, 1) as
the gradient of a vector of ours, the probe. So autograd itself sums over tokens, uses of the layer and backward passes, whatever
checkpointing recomputes and whatever never gets a gradient does not count, and torch.compile sees plain tensor code. With `fused`, a
linear layer's own forward is replaced instead, by a function that hands X and D to the optimiser in place of a weight gradient.

The modules keep their classes, names and state dict. Copies and pickles of a model are without any of this.
"""

from __future__ import annotations

import fnmatch
import types
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad as weight_gradients
from transformers.pytorch_utils import Conv1D

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: weight_gradients.conv1d_weight,
    nn.Conv2d: weight_gradients.conv2d_weight,
    nn.Conv3d: weight_gradients.conv3d_weight,
}
# Layers whose weight is the product above, by what computes their forward pass (a subclass that computes another is not one)
_LAYERS: dict[str, tuple[Any, ...]] = {"linear": (nn.Linear,), "transposed": (Conv1D,), "convolution": tuple(_CONVOLUTIONS), "embedding": (nn.Embedding,)}  # fmt: skip


@dataclass(frozen=True)
class Owner:
    """The module a weight belongs to, and what it is: a key of `_LAYERS`, or in `reason` why the weight has no factors."""

    module: nn.Module
    kind: str | None = None
    reason: str = ""


def owners(model: nn.Module, embeddings: bool = False, exclude: Collection[str] = ()) -> dict[str, Owner]:
    """Every parameter of the model, by name. `exclude` are names or patterns like `*.head.weight` that get no factors."""
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                held.setdefault(id(parameter), []).append((module, name))
    found = {}
    for name, parameter in model.named_parameters():
        places = held[id(parameter)]
        module, attribute = places[0]
        kind, reason = _kind(module), ""
        if len(places) > 1:
            reason = "tied"
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            reason = "excluded"
        elif attribute != "weight" or kind is None:
            reason = "vector" if parameter.dim() < 2 else "other layer"
        elif kind == "embedding" and not embeddings:
            reason = "embedding"
        found[name] = Owner(module, None if reason else kind, reason)
    return found


def _kind(module: nn.Module) -> str | None:
    for kind, classes in _LAYERS.items():
        for layer in classes:
            if isinstance(module, layer) and type(module).forward is layer.forward:
                return kind if _is_plain(module) else None
    return None


def _is_plain(module: Any) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return getattr(module, "groups", 1) == 1


class LayerFactors:
    """The sums of one weight since the last step, as a vector [s (n) | r (m) | number of uses].

    name: of the weight in the model. module, kind: see `Owner`. inputs, outputs: n and m. p: the exponent of the inputs.
    fused: None, or what takes (X, D) of a use in place of the gradient; it returns what to add to the sums.
    """

    def __init__(self, name: str, owner: Owner) -> None:
        assert owner.kind is not None
        self.name, self.module, self.kind = name, owner.module, owner.kind
        weight: Any = owner.module.weight
        rows, columns = weight.shape[0], weight[0].numel()
        self.inputs, self.outputs = (rows, columns) if self.rows_are_inputs else (columns, rows)
        self.p = 2.0
        self.probe = self._new_probe(weight.device)
        self.fused: Callable[[Tensor, Tensor], Tensor] | None = None
        self._handles: list[Any] = []
        self.drop()

    def _new_probe(self, device: torch.device) -> Tensor:
        probe = torch.zeros(self.inputs + self.outputs + 1, device=device, requires_grad=True)
        probe.register_post_accumulate_grad_hook(self._arrived)
        return probe

    @property
    def rows_are_inputs(self) -> bool:
        """Whether the weight is stored as n x m."""
        return self.kind in ("transposed", "embedding")

    @property
    def q(self) -> float:
        return self.p / (self.p - 1)

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as it is now (FSDP replaces it)."""
        weight: nn.Parameter = self.module._parameters["weight"]  # type: ignore[assignment]
        return weight

    # --- a window: all backward passes between two steps ---

    def drop(self) -> None:
        """Forget the sums."""
        self._earlier: Tensor | None = None  # sums up to the last backward pass
        self._latest: Tensor | None = None  # of the last one
        self._passes = self._weight_passes = self._first = 0

    @property
    def sums(self) -> Tensor | None:
        """The vector, or None when the layer has not been used."""
        # A weight whose gradient was absent before a pass starts anew with it: somebody threw the earlier gradient away
        # (a step skipped for overflow and model.zero_grad()), and its sums with it.
        if self._earlier is None or self._latest is None or self._first == self._passes:
            return self._latest
        return self._earlier + self._latest

    def add(self, sums: Tensor) -> None:
        """Count one backward pass."""
        self._earlier = self.sums
        self._latest = sums
        self._passes += 1

    def _arrived(self, probe: Tensor) -> None:
        sums, probe.grad = probe.grad, None
        assert sums is not None
        self.add(sums)

    def _weight_gradient_comes(self, gradient: Tensor) -> None:
        self._weight_passes += 1
        if self.weight.grad is None:
            self._first = self._weight_passes

    # --- watching the module ---

    def watch(self, input_sums: Callable[[LayerFactors, Tensor], Tensor]) -> None:
        """Begin. `input_sums` computes s, see `InputSums`. An earlier optimiser's watch over the same layer ends."""
        earlier = [*self.module._forward_hooks.values(), self.module.__dict__.get("forward")]
        for hook in earlier:
            if isinstance(hook, _Hook | _FusedForward):
                hook.layer.unwatch()
        if self.fused is not None:
            self.module.forward = _FusedForward(self)
            return
        handle = self.module.register_forward_hook(_Hook(self, input_sums), with_kwargs=True)
        self._handles = [handle, self.weight.register_hook(self._weight_gradient_comes)]

    def unwatch(self) -> None:
        """End, and leave the module as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, _FusedForward) and forward.layer is self:
            del self.module.forward
        self.drop()

    def can_fuse(self) -> bool:
        """Linear layers can, unless somebody else has replaced their forward."""
        replaced = self.module.__dict__.get("forward")
        return self.kind in ("linear", "transposed") and (replaced is None or isinstance(replaced, _FusedForward))

    def input_sums(self, x: Tensor) -> Tensor:
        """s of one use of the layer, float32 (n)."""
        if self.kind == "embedding":
            ids, padding = x.reshape(-1), cast(nn.Embedding, self.module).padding_idx
            ones = torch.ones(len(ids), device=x.device) if padding is None else ids.ne(padding).float()
            return torch.zeros(self.inputs, device=x.device).index_add_(0, ids, ones)
        if self.kind == "convolution":
            return convolution_input_sums(self.module, x, self.p)
        return power_sums(x, self.p, -1)

    def output_sums(self, gradient: Tensor) -> Tensor:
        """r of one use, float32 (m)."""
        axis = -1 if self.kind != "convolution" else gradient.dim() - self.weight.dim() + 1
        return power_sums(gradient, self.q, axis)


def power_sums(values: Tensor, exponent: float, axis: int) -> Tensor:
    """sum |values|^exponent over all axes but one; float32."""
    values = values.float()
    powers = values.square() if exponent == 2 else values.abs().pow(exponent)
    axis %= values.dim()
    others = [i for i in range(values.dim()) if i != axis]
    return powers.sum(others) if others else powers


def convolution_input_sums(module: Any, x: Tensor, p: float) -> Tensor:
    """For each weight of one output channel of a convolution (C_in * kernel), sum of |x|^p over the inputs it meets.

    That is the correlation of |x|^p with a map of ones the size of the output; no patches are formed.
    """
    dimensions = len(module.kernel_size)
    x = x.float() if x.dim() == dimensions + 2 else x.float()[None]
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=mode), 0
    powers = x.abs().pow(p).sum(0, keepdim=True)
    padded = padding if isinstance(padding, tuple) else (padding,) * dimensions
    settings = zip(x.shape[2:], padded, module.dilation, module.kernel_size, module.stride, strict=True)
    out = [(size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, pad, dilation, kernel, stride in settings]  # fmt: skip
    sums = next(function for kind, function in _CONVOLUTIONS.items() if isinstance(module, kind))(
        powers, (1, x.shape[1], *module.kernel_size), powers.new_ones(1, 1, *out),
        stride=module.stride, padding=padding, dilation=module.dilation,
    )  # fmt: skip
    return sums.flatten()


class InputSums:
    """Computes s, once for layers that read the same tensor (the query, key and value projections do)."""

    def __init__(self) -> None:
        self._input: Any = None  # a weak reference to the last tensor
        self._key: tuple[int, float] = (0, 0.0)
        self._sums: Tensor | None = None

    @torch.no_grad()
    def __call__(self, layer: LayerFactors, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or layer.kind not in ("linear", "transposed"):
            return layer.input_sums(x)
        key = (x._version, layer.p)
        if self._sums is None or self._input() is not x or self._key != key:
            self._input, self._key, self._sums = weakref.ref(x), key, layer.input_sums(x)
        return self._sums


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook is in a copy of the model."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


def _own_forward(module: nn.Module) -> Any:
    """What a fused forward is in a copy: the class's."""
    return types.MethodType(type(module).forward, module)


class _Hook:
    """After a layer's forward: let its output pass through `_Probe`."""

    def __init__(self, layer: LayerFactors, input_sums: Callable[[LayerFactors, Tensor], Tensor]) -> None:
        self.layer = layer
        self.input_sums = input_sums

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        layer = self.layer
        if not torch.is_grad_enabled() or not output.requires_grad or not module.weight.requires_grad:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        if layer.probe.device != output.device:
            layer.probe = layer._new_probe(output.device)
        counted = None
        if layer.kind == "embedding" and module.padding_idx is not None:
            counted = x != module.padding_idx  # torch gives the padding's row no gradient
        passed: Tensor = _Probe.apply(output, self.input_sums(layer, x), layer.probe, counted, layer)
        return passed

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles
        return _make_nothing, ()


class _Probe(torch.autograd.Function):
    """The identity of `output`. The gradient of `probe` is [s | r | 1]."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, input_sums: Tensor, probe: Tensor, counted: Tensor | None, layer: LayerFactors
    ) -> Tensor:
        ctx.save_for_backward(input_sums, counted)
        ctx.layer = layer
        return output.detach()  # not a view to autograd, so that what follows may still work in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input_sums, counted = ctx.saved_tensors
        own = gradient if counted is None else gradient * counted[..., None]
        sums = [input_sums, ctx.layer.output_sums(own), input_sums.new_ones(1)]
        return gradient, None, torch.cat(sums), None, None


class _FusedForward:
    """A linear layer's forward whose backward gives its weight no gradient, but calls `layer.fused`."""

    def __init__(self, layer: LayerFactors) -> None:
        self.layer = layer

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self.layer.module
        if not torch.is_grad_enabled() or not module.weight.requires_grad:
            plain: Tensor = type(module).forward(module, x)
            return plain
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: Tensor = _FusedLinear.apply(x, module.weight, module.bias, self.layer)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self.layer.module,)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerFactors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        with torch.autocast(x.device.type, enabled=False):
            matrix = weight.T if layer.rows_are_inputs else weight
            return F.linear(x, matrix.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: LayerFactors = ctx.layer
        matrix = weight.T if layer.rows_are_inputs else weight
        flat = gradient.reshape(-1, layer.outputs)
        assert layer.fused is not None
        layer.add(layer.fused(x.reshape(-1, layer.inputs), flat))
        into = gradient @ matrix.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return into, None, bias, None
