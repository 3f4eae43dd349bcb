"""Folders with a quantised model and its adapter, in four formats, and how they are read again.

| format | weights | read by |
|---|---|---|
| acclimate | packed, in GPTQ's layout | transformers, once `acclimate.compress` has been imported |
| gptq | the same tensors | gptqmodel, vLLM, transformers with gptqmodel |
| compressed-tensors | packed ("pack-quantized"), 4 or 8 bits | vLLM, transformers with compressed-tensors |
| dense | ordinary numbers, as large as before | everything |

The adapter is an ordinary PEFT LoRA in the sub-folder `adapter`, in 16 bits, of scaling 1: base and adapter belong together.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate.compress.packing import pack, unpack
from acclimate.compress.quant_linear import NAME, QuantLinear, mark, quantized_layers
from acclimate.compress.quantizer import to_dense, unmark
from acclimate.models import quiet
from acclimate.runs import read_json, replacing, write_json

Format = Literal["acclimate", "gptq", "compressed-tensors", "dense"]
FORMATS = ("acclimate", "gptq", "compressed-tensors", "dense")
ADAPTER = "adapter"
PACKED = ("qweight", "qzeros", "scales", "g_idx")


def save_quantized(
    model: Any,
    directory: str | Path,
    format: Format = "acclimate",
    *,
    adapter_dtype: torch.dtype | None = torch.float16,
) -> Path:
    """Write what `quantize_projq` returned, trained further or not; returns the directory.

    `adapter_dtype` None: as it is. Before it is trained the adapter has numbers of 16 bits, so nothing is lost.
    Raises ValueError for an unknown format, or one that cannot hold the model; FileExistsError is left to the caller.
    """
    check_format(format, next(iter(quantized_layers(model).values())).bits)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    plain = _without_adapters(base)
    with replacing(Path(directory)) as temporary, quiet():
        _save_base(plain, temporary, format)
        if isinstance(model, PeftModel):
            model.save_pretrained(str(temporary / ADAPTER))
            _finish_adapter(temporary / ADAPTER, adapter_dtype)
    return Path(directory)


def load_quantized(directory: str | Path, *, adapter: bool = True) -> Any:
    """A model written by `save_quantized`, in any of the formats, with its adapter on it if it has one."""
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    config = read_json(directory / "config.json").get("quantization_config") or {}
    kind = config.get("quant_method")
    with quiet():
        if kind in (None, NAME):
            model = AutoModelForCausalLM.from_pretrained(directory)
        else:
            model = _read_packed(directory, config)
        if adapter and (directory / ADAPTER).is_dir():
            return PeftModel.from_pretrained(model, str(directory / ADAPTER)).eval()
    return model.eval()


def dequantize_and_merge(model: Any) -> Any:
    """A dense model with the adapter folded in; the quantised one stays. The sum is on no grid, so its size is that of 16 or 32 bits."""
    for layer in quantized_layers(model).values():
        layer.forget()  # what need not be copied
    dense = copy.deepcopy(model)
    base = dense.get_base_model() if isinstance(dense, PeftModel) else dense
    to_dense(base, QuantLinear)
    unmark(base)
    return dense.merge_and_unload() if isinstance(dense, PeftModel) else dense


def check_format(format: str, bits: int) -> None:
    """Raises ValueError for a format that is unknown, or cannot hold weights of so many bits."""
    if format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, not '{format}'")
    if format == "compressed-tensors" and bits not in (4, 8):
        raise ValueError(f"compressed-tensors holds weights of 4 or 8 bits, not {bits}; take gptq")


def _without_adapters(base: Any) -> Any:
    """A copy of a base model without the adapters' modules around its layers; its tensors are shared."""
    for layer in quantized_layers(base).values():
        layer.forget()
    memo = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    plain = copy.deepcopy(base, memo)
    for name, module in list(plain.named_modules()):
        if hasattr(module, "base_layer"):
            plain.set_submodule(name, module.base_layer)
    plain._hf_peft_config_loaded = False
    return plain


def _save_base(model: Any, directory: Path, format: Format) -> None:
    layers = quantized_layers(model)
    first = next(iter(layers.values()))
    facts: dict[str, Any] = getattr(model.config.quantization_config, "facts", None) or {}
    if format == "dense":
        to_dense(model, QuantLinear)
        unmark(model)
        model.save_pretrained(directory)
        return
    model.save_pretrained(directory)
    if format == "compressed-tensors":
        _repack(directory, layers, facts.get("sym", False))
        _write_config(directory, _compressed_tensors_config(model, first, facts))
    if format == "gptq":
        _write_config(
            directory,
            {
                "quant_method": "gptq", "bits": first.bits, "group_size": facts.get("group_size", first.group_size),
                "desc_act": facts.get("desc_act", False), "static_groups": facts.get("desc_act", False),
                "sym": facts.get("sym", False), "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False,
                "meta": {"quantizer": ["acclimate"]}, "modules": list(layers),
            },
        )  # fmt: skip


def _repack(directory: Path, layers: dict[str, QuantLinear], symmetric: bool) -> None:
    """Put the other layout's tensors in the place of GPTQ's, shard by shard."""
    where: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state = load_file(file)
        for name, layer in layers.items():
            if f"{name}.qweight" in state:
                state |= {f"{name}.{key}": value for key, value in to_compressed_tensors(layer, symmetric).items()}
            for key in PACKED:  # a layer may lie in two shards
                state.pop(f"{name}.{key}", None)
        save_file(state, file, metadata={"format": "pt"})
        where |= dict.fromkeys(state, file.name)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        write_json(index, {**read_json(index), "weight_map": where})


def _write_config(directory: Path, quantization: dict[str, Any]) -> None:
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", {**config, "quantization_config": quantization})


def _finish_adapter(directory: Path, dtype: torch.dtype | None) -> None:
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    if dtype is not None:
        file = directory / "adapter_model.safetensors"
        state = {key: value.to(dtype) for key, value in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})


# --- other layouts ---


def to_compressed_tensors(layer: QuantLinear, symmetric: bool) -> dict[str, Tensor]:
    """The tensors of "pack-quantized": codes packed along the inputs, and zero points, which a symmetric grid has not, along the outputs."""
    codes = unpack(layer.qweight, layer.bits, layer.in_features)
    found = {
        "weight_packed": pack(codes, layer.bits).T.contiguous(),
        "weight_scale": layer.scales.T.contiguous(),
        "weight_shape": torch.tensor([layer.out_features, layer.in_features]),
    }
    if not symmetric:
        found["weight_zero_point"] = pack(unpack(layer.qzeros.T, layer.bits, layer.out_features) + 1, layer.bits)
    return found


def _from_compressed_tensors(layer: QuantLinear, tensors: dict[str, Tensor]) -> None:
    codes = unpack(tensors["packed"].T, layer.bits, layer.in_features)
    packed = tensors.get("zero_point")
    middle = torch.full(
        (layer.out_features, layer.in_features // layer.group_size), 2 ** (layer.bits - 1), dtype=torch.uint8
    )
    zeros = middle if packed is None else unpack(packed, layer.bits, layer.out_features)
    layer.qweight = pack(codes, layer.bits)
    layer.qzeros = pack(zeros - 1, layer.bits).T.contiguous()
    layer.scales = tensors["scale"].T.contiguous()
    layer.g_idx = (torch.arange(layer.in_features) // layer.group_size).to(torch.int32)


def _compressed_tensors_config(model: Any, layer: QuantLinear, facts: dict[str, Any]) -> dict[str, Any]:
    quantised = quantized_layers(model)
    ignored = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name not in quantised
    ]
    weights = {
        "num_bits": layer.bits, "type": "int", "symmetric": facts.get("sym", False), "strategy": "group", "group_size": layer.group_size,
        "dynamic": False, "actorder": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ignored,
        "modules": list(quantised), "facts": facts,
    }  # fmt: skip


def _read_packed(directory: Path, config: dict[str, Any]) -> Any:
    """A folder in another engine's format, without that engine."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.from_pretrained(directory)
    del model_config.quantization_config
    model = AutoModelForCausalLM.from_config(model_config)
    weights = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else None
    bits = weights["num_bits"] if weights else config["bits"]
    group_size = weights["group_size"] if weights else config["group_size"]
    state: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state |= load_file(file)
    for name in config["modules"]:
        old: Any = model.get_submodule(name)
        layer = QuantLinear(
            old.in_features, old.out_features, bits, group_size, old.bias is not None, dtype=old.weight.dtype
        )
        if weights:
            own = {
                key.removeprefix(f"{name}.weight_"): state.pop(key)
                for key in list(state)
                if key.startswith(f"{name}.weight_")
            }
            _from_compressed_tensors(layer, own)
            state |= {f"{name}.{key}": value for key, value in layer.state_dict().items() if key != "bias"}
        model.set_submodule(name, layer)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ValueError(f"'{directory}' does not hold the model of its config.json: {[*missing, *unexpected][:3]}")
    model.tie_weights()
    mark(model, {**config.get("facts", {}), "bits": bits, "group_size": group_size})
    return model
