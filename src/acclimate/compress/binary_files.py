"""What binary networks take: their sizes and operations counted, and their weights in files of one bit each."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate.compress.binary_gradients import Convolution, Inputs, SurgeConfig, output, sign
from acclimate.compress.binary_modules import BinaryLayer, of_layer
from acclimate.compress.surge import binary_layers, run_watched
from acclimate.errors import missing_extra
from acclimate.runs import replacing

FORMAT = "acclimate-binary-1"
PARTS = (
    "weight",
    "alpha",
    "aux_weight",
    "aux_left",
    "aux_right",
    "ratio",
)  # of a layer, which the packed file has as bits or not at all


# --- counting ---


@dataclass
class BinaryReport:
    """A row a layer: name, kind, bits of weights and activations, weights, MACs of one input, and bytes on disk (packed, binary ones).

    `bops` are the MACs of binary layers, `flops` those of the others; `operations` = bops / 64 + flops, since 64 binary products are one
    instruction. Norms, activations and additions do not count.
    """

    layers: list[dict[str, Any]] = field(default_factory=list)
    bops: int = 0
    flops: int = 0
    bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def operations(self) -> float:
        return self.bops / 64 + self.flops

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "operations": self.operations}


def report(model: nn.Module, example_inputs: Any) -> BinaryReport:
    """Count the convolutions and linear layers of `model` on `example_inputs` of one row, a tensor or the model's arguments as a tuple
    or dictionary.

    A binary layer whose inputs take two values only in part is none: layers that get integers or see weights of other than one bit are
    named in `warnings`.
    """
    found = BinaryReport()
    known = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    }

    def count(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        binary = isinstance(module, BinaryLayer)
        fan_in = module.weight[0].numel()
        macs = output[0].numel() * fan_in
        outputs = len(module.weight)
        size = outputs * (math.ceil(fan_in / 8) + 4) if binary else module.weight.numel() * module.weight.element_size()
        found.layers.append(
            {
                "name": known[module], "kind": type(module).__name__, "weight_bits": 1 if binary else 8 * module.weight.element_size(),
                "activation_bits": 1 if binary else 8 * args[0].element_size(), "weights": module.weight.numel(), "macs": macs, "bytes": size,
            }
        )  # fmt: skip
        found.bops += macs if binary else 0
        found.flops += 0 if binary else macs
        found.bytes += size + (0 if module.bias is None else module.bias.numel() * module.bias.element_size())

    run_watched(model, example_inputs, [module.register_forward_hook(count) for module in known])
    unused = sorted(set(known.values()) - {row["name"] for row in found.layers})
    if unused:
        found.warnings.append(f"{len(unused)} layers were not run by these inputs, e.g. '{unused[0]}'")
    full = [row["name"] for row in found.layers if row["weight_bits"] > 1]
    if len(full) == len(found.layers):
        found.warnings.append("no layer is binary")
    return found


# --- files ---


@torch.no_grad()
def export(model: nn.Module, path: str | Path, fmt: str = "safetensors", *, example_inputs: Any = None) -> None:
    """Write `model` for inference, without W_a: its weights in a safetensors file, or weights and graph as ONNX.

    "safetensors": of a binary layer, `NAME.weight_bits` (outputs, ceil(fan-in / 8)) uint8 has the signs (1: +1), the first in the lowest bit of
    the first byte, and `NAME.weight_alpha` (outputs,) what they are multiplied with. Everything else is as in the state dict.

    "onnx": binary layers become Sign, Add 0.5, Sign (ONNX's Sign is 0 at 0, which is +1 here), Conv or Gemm with weights of +-1, Round, and Mul
    with alpha. `example_inputs` (a tensor, or the model's arguments as a tuple or dictionary) are traced; of two rows or more, the number of rows
    stays open. The file is one protobuf, of 2 GB at most.

    Raises
    ------
    ValueError
        The model is in training mode, a weight is not a number (the layer is named), or no layer is binary; another `fmt`, or "onnx" without
        `example_inputs`. MissingError: "onnx" without the packages of acclimate[onnx].
    """
    if fmt not in ("safetensors", "onnx"):
        raise ValueError(f"fmt is 'safetensors' or 'onnx', not {fmt!r}")
    if model.training:
        raise ValueError(
            "the model is in training mode: call model.eval() first, so that what is written is what was tested"
        )
    layers = dict(binary_layers(model))
    if not layers:
        raise ValueError("there is no binary layer to pack")
    for name, layer in layers.items():
        if not layer.weight.isfinite().all():
            raise ValueError(f"weights of '{name}' are not finite numbers")
    if fmt == "safetensors":
        _write_packed(model, layers, Path(path))
    elif example_inputs is None:
        raise ValueError("ONNX has a graph, which is traced: give example_inputs")
    else:
        _write_onnx(model, layers, Path(path), example_inputs)


def _write_packed(model: nn.Module, layers: dict[str, BinaryLayer], path: Path) -> None:
    packed_away = {f"{name}.{part}" for name in layers for part in PARTS}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name not in packed_away}
    facts: dict[str, Any] = {}
    for name, layer in layers.items():
        latent = layer.latent()
        bits = (latent >= 0).flatten(1).cpu().numpy()
        packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
        alpha = layer.scale(latent).flatten().expand(len(latent)).contiguous()
        tensors |= {f"{name}.weight_bits": packed, f"{name}.weight_alpha": alpha}
        facts[name] = {
            "shape": list(latent.shape), "sha256": _checksum(packed), "activation": layer.config.activation, "beta": layer.config.beta,
        }  # fmt: skip
    with replacing(path) as temporary:
        # tied weights are written under each of their names
        save_file(
            {name: value.clone() for name, value in tensors.items()},
            temporary,
            metadata={"format": FORMAT, "layers": json.dumps(facts)},
        )


class _Whole(Convolution):
    """With its results rounded. They are whole already, but runtimes that see a Conv and a Mul merge alpha into the weights, and the sum of
    products that was 0 no longer is: the sign after it would be left to rounding errors."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().__call__(x, weight, bias).round()


class _Shipped(nn.Module):
    """A binary layer in operations that ONNX has, its weights +-1 and alpha apart."""

    signs: Tensor
    alpha: Tensor

    def __init__(self, layer: BinaryLayer) -> None:
        super().__init__()
        latent = layer.latent()
        self.layer, self.op = layer, _Whole(**asdict(layer.operation()))
        self.register_buffer("signs", sign(latent))
        self.register_buffer("alpha", layer.scale(latent).flatten())

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        inputs = Inputs(layer.config.activation, layer.input_scale, layer.threshold, layer.tokens(x, layer.operation()))
        return layer.cropped(output(self.op, inputs, x, self.signs, self.alpha, layer.bias))


def _write_onnx(model: nn.Module, layers: dict[str, BinaryLayer], path: Path, example_inputs: Any) -> None:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise missing_extra(package, "onnx", "Writing ONNX") from error
    shipped = copy.deepcopy(model)
    for name in layers:
        shipped.set_submodule(name, _Shipped(shipped.get_submodule(name)))  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"kwargs": example_inputs} if isinstance(example_inputs, dict) else {}
    if not arguments:
        arguments["args"] = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    free = {0: torch.export.Dim.AUTO}
    values = next(iter(arguments.values()))
    shapes = dict.fromkeys(values, free) if isinstance(values, dict) else tuple(free for _ in values)
    program = torch.onnx.export(shipped, **arguments, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    with replacing(path) as temporary:
        program.save(temporary, external_data=False)


def load_packed(path: str | Path, model: nn.Module) -> nn.Module:
    """Fill `model`, the architecture with ordinary or binary layers, from a file of `export`; returns it, in evaluation mode.

    Its binary layers have weights of +-1, unpacked once, and outputs equal those of the exported model bit for bit.

    Raises ValueError for another file, a layer that the model lacks or has in another shape, or damaged bits (the layer is named).
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"'{path}' was not written by acclimate.compress.binary_files.export")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    facts = {
        name: {"activation": "sign", "beta": None, **fact} for name, fact in json.loads(metadata["layers"]).items()
    }
    known = dict(model.named_modules())
    for name, fact in facts.items():
        bits, alpha = tensors.pop(f"{name}.weight_bits"), tensors.pop(f"{name}.weight_alpha")
        if name not in known or list(known[name].weight.shape) != fact["shape"]:
            raise ValueError(f"layer '{name}' of {fact['shape']} is not in the model, or has another shape there")
        if _checksum(bits) != fact["sha256"] or bits.shape != (
            fact["shape"][0],
            math.ceil(math.prod(fact["shape"][1:]) / 8),
        ):
            raise ValueError(f"the bits of '{name}' are damaged: their checksum or shape is not what was written")
        signs = np.unpackbits(bits.numpy(), axis=1, count=math.prod(fact["shape"][1:]), bitorder="little")
        tensors[f"{name}.weight"] = (2 * torch.from_numpy(signs).to(alpha.dtype) - 1).view(fact["shape"])
        tensors[f"{name}.alpha"] = alpha.view(-1, *[1] * (len(fact["shape"]) - 1))
    _prepare(model, facts)
    model.load_state_dict(tensors)
    return model.requires_grad_(False).eval()


def _prepare(model: nn.Module, facts: dict[str, Any]) -> None:
    """Make exactly the layers of `facts` binary, without W_a, with a scale of their own."""
    for name, fact in facts.items():
        layer: Any = model.get_submodule(name)
        config = SurgeConfig(aux=None, alpha="learned", activation=fact["activation"], beta=fact["beta"])
        if isinstance(layer, BinaryLayer):
            layer.strip()
            layer.set_up(config)
        else:
            model.set_submodule(name, of_layer(layer, config))


def _checksum(bits: Tensor) -> str:
    return hashlib.sha256(bits.contiguous().numpy().tobytes()).hexdigest()
