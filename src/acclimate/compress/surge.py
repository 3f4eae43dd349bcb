"""Train networks whose weights and activations are one bit each, with a learned full-precision help for the gradient that inference never sees.

A binary layer computes y = alpha op(sign(x), sign(W)), op a convolution or a matrix product, alpha = mean |W| of each output's inputs. sign has
no useful derivative, so training replaces it by a mask: of a straight-through estimator 1[|x| <= 1], and so on. That is biased, and blind
outside of [-1, 1]. SURGE adds, in the backward pass alone, the gradient of a full-precision layer with weights W_a; for dL/dy = d,

    g_b = op'(d, alpha sign W) mask(x)      g_a = op'(d, W_a)      lambda = eta ||g_b|| / ||g_a||
    dL/dx = g_b + lambda g_a      dL/dW = op'_W(d, sign x) alpha mask(W)      dL/dW_a = lambda op'_W(d, x)

which is the gradient of f_b - stop(lambda f_a) + lambda f_a, a function whose value is f_b: f_a is never computed, outputs are bit for bit those
of the binary layer, and `strip_aux` removes W_a without a trace. It costs two more products in the backward pass (5/3 of a step; 4/3 with
aux="shared", whose W_a is W itself).

On request outputs are also scaled by the mean |x| of what led to them (`beta`), and inputs take two learned values around a learned threshold
(`activation`, for encoders: `bert_config`). `binary_gradients` has the mathematics, `binary_modules` the layers, `binary_files` sizes and files,
`binary_networks` the networks of the literature.

Scale: ordinary parameters, so DDP, FSDP2, accumulation and checkpointing work as for any layer; lambda is of each process's own batch unless
`ags_sync`, which all-reduces two numbers a layer.

Source: "SURGE: Surrogate Gradient Adaptation in Binary Neural Networks", arXiv 2605.10989 (ICML 2026). Estimators: STE, arXiv 1602.02830; Bi-Real,
arXiv 1808.00278; EDE of IR-Net, arXiv 1909.10788; ReCU, arXiv 2103.12369. beta: XNOR-Net, arXiv 1603.05279. Elastic activations: BiT, arXiv
2205.13016; their scale of each token is ours, and so are aux "shared" and "lowrank:r", and the clip of W.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from acclimate.compress.binary_gradients import SurgeConfig
from acclimate.compress.binary_modules import (
    KINDS,
    BinaryConv1d,
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    of_layer,
)
from acclimate.prefix import evaluation_mode

__all__ = [
    "BinaryConv1d",
    "BinaryConv2d",
    "BinaryLayer",
    "BinaryLinear",
    "SurgeCallback",
    "SurgeConfig",
    "bert_config",
    "binarize",
    "binary_layers",
    "clip_latent_",
    "parameter_groups",
    "set_progress",
    "strip_aux",
]


def bert_config(**options: Any) -> SurgeConfig:
    """The configuration for encoders of the BERT family (modules "encoder.layer.N. .."): all linear layers of the encoder's blocks are binary.

    Their inputs take the two values -a and a of each token's size around a learned threshold ("elastic" with beta="mean"), and 0 and a where they
    come from GELU or ReLU (the second layer of the feed-forward part). Embeddings, pooler and heads stay. `options` are SurgeConfig's.
    """
    skip = options.pop("skip", ())
    elastic = options.get("activation", "elastic") == "elastic"
    return SurgeConfig(
        **{
            "activation": "elastic",
            "beta": "mean",
            "nonnegative": (r"\.\d+\.output\.dense$",) if elastic else (),
            "skip": (r"^(?!(.*\.)?encoder\.layer\.\d+\.)", *skip),
            "skip_ends": False,
            **options,
        }
    )


def binarize(model: nn.Module, config: SurgeConfig | None = None, *, example_inputs: Any = None) -> nn.Module:
    """Replace the convolutions and linear layers of `model` by binary ones with their weights, in place; returns the model.

    Layers that share a weight go on sharing it. A second call changes nothing and warns. `example_inputs` (a tensor, or the model's
    arguments as a tuple or dictionary) are run once before, for elastic activations without beta: their scales start from the mean size of what each layer gets.

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
    met = _inputs(model, {layer for _, layer in chosen}, example_inputs) if example_inputs is not None else {}
    made: dict[int, BinaryLayer] = {}
    weights: dict[int, BinaryLayer] = {}
    for name, layer in chosen:
        if id(layer) not in made:
            positive = any(re.search(pattern, name) for pattern in config.nonnegative)
            own = replace(config, activation="elastic01", nonnegative=()) if positive else config
            made[id(layer)] = binary = of_layer(layer, own)
            if layer in met:
                binary.start_from(met[layer])
            first = weights.setdefault(id(layer.weight), binary)
            if first is not binary:  # tied
                for part in ("weight", "aux_weight", "aux_left", "aux_right"):
                    if hasattr(first, part):
                        setattr(binary, part, getattr(first, part))
        model.set_submodule(name, made[id(layer)])
    return model


def _inputs(model: nn.Module, layers: set[nn.Module], example_inputs: Any) -> dict[nn.Module, torch.Tensor]:
    """What `layers` get when the model is run."""
    met: dict[nn.Module, torch.Tensor] = {}

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        met[layer] = inputs[0]

    run_watched(model, example_inputs, [layer.register_forward_pre_hook(look) for layer in layers])
    return met


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
        if type(module) not in KINDS or not module.weight.is_floating_point() or module.weight.is_sparse:
            raise TypeError(f"'{name}' is a {type(module).__name__}, which cannot be made binary: name it in skip")
        chosen.append((name, module))
    return chosen


def run_watched(model: nn.Module, inputs: Any, hooks: Sequence[RemovableHandle]) -> None:
    """Run the model for its `hooks`, which are removed then. `inputs`: a tensor, a tuple of positional or a dictionary of keyword arguments."""
    try:
        with evaluation_mode(model), torch.no_grad():
            if isinstance(inputs, dict):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    finally:
        for hook in hooks:
            hook.remove()


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
    """Clip the weights behind the signs to what the layers' `clip_latent` says, and elastic scales to 1e-3 and more; call it after each step."""
    for _, layer in binary_layers(model):
        if layer.config.clip_latent is not None:
            layer.weight.clamp_(-layer.config.clip_latent, layer.config.clip_latent)
        if layer.input_scale is not None:
            layer.input_scale.clamp_(min=1e-3)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, and those that do not: W_a, alpha, biases and norms."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        spared = parameter.ndim < 2 or "aux_" in name or name.endswith("alpha")
        groups[spared].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


class SurgeCallback(TrainerCallback):
    """For transformers' Trainer: tells the layers the progress, clips after each step, and every `log_every` steps logs the mean lambda and
    cosine of g_b and g_a over the layers ("surge/lambda", "surge/cosine"), and how many had no binary gradient ("surge/dead_layers").

    `layers` has a row a layer and logged step: step, layer, lambda, norm_b, norm_a and cosine, of the layer's last backward pass.
    """

    def __init__(self, log_every: int = 50) -> None:
        self.log_every, self.warned = log_every, False
        self.layers: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        set_progress(model, state.global_step / max(1, state.max_steps))
        for _, layer in binary_layers(model):
            layer.tally.watch = (state.global_step + 1) % self.log_every == 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        clip_latent_(model)
        told = [(name, layer.tally) for name, layer in binary_layers(model) if layer.tally.watch and layer.tally.values]
        if not told:
            return
        rows = [{key: float(value) for key, value in tally.values.items()} for _, tally in told]
        self.layers += [
            {"step": state.global_step, "layer": name, **row} for (name, _), row in zip(told, rows, strict=True)
        ]
        dead = sum(tally.dead > tally.passes / 2 for _, tally in told)
        means = {f"surge/{key}": sum(row[key] for row in rows) / len(rows) for key in ("lambda", "cosine")}
        state.log_history.append({"step": state.global_step, **means, "surge/dead_layers": dead})
        if dead and not self.warned:
            self.warned = True
            warnings.warn(
                f"{dead} binary layers got no gradient in most steps, so nothing compensates them", stacklevel=2
            )
