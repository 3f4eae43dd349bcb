"""Write a FrameFT adapter as an ordinary LoRA directory, for engines that know nothing of FrameFT.

dW = c F_out^T S F_in has rank at most min(distinct rows, distinct columns) of S, and its factors are B A: exactly, if LoRA's rank
is that large, else as the best approximation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate.adapters.frame import adapted_layers


def to_lora(model: Any, path: str | Path, rank: int | None = None, adapter_name: str = "default") -> dict[str, float]:
    """Write a FrameFT adapter as an ordinary LoRA directory, for engines that know nothing of FrameFT.

    A layer needs rank min(distinct rows, distinct columns) of its coefficients: sqrt(n_coefficients) with support="compact", but
    nearly n_coefficients with "random". `rank` None takes the largest need, and is exact; a smaller one cuts each change to
    its best approximation (truncated SVD). The rank is the same for all layers, lora_alpha equals it, and the scale is in B.

    Returns the relative error ||dW - B A|| / ||dW|| of each layer, which is also written to conversion.json.
    Raises ValueError for a model without such an adapter, or a rank below 1.
    """
    layers = list(adapted_layers(getattr(model, "base_model", model).model, adapter_name))
    if not layers:
        raise ValueError(f"the model has no FrameFT adapter '{adapter_name}'")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    factors, config = {}, model.peft_config[adapter_name]
    for name, layer, settings in layers:
        # in double precision: the change is exact to the last bit of the float32 file
        s = settings.factor * layer.frameft_coefficients[adapter_name].detach().cpu().double()
        factors[name] = layer.sparse_update(adapter_name, s.dtype, s.device).factors(s)
    r = rank or max(b.shape[1] for b, _ in factors.values())
    state = {
        key: value
        for key, value in get_peft_model_state_dict(model, adapter_name=adapter_name).items()
        if "frameft_" not in key  # modules_to_save
    }
    errors = {}
    for name, (b, a) in factors.items():
        b, a, errors[name] = _truncated(b, a, r) if b.shape[1] > r else (b, a, 0.0)
        missing = r - b.shape[1]
        pair = {"A": nn.functional.pad(a, (0, 0, 0, missing)), "B": nn.functional.pad(b, (0, missing))}
        for letter, value in pair.items():
            state[f"base_model.model.{name}.lora_{letter}.weight"] = value.float().cpu().contiguous()
    path = Path(path)
    LoraConfig(
        r=r,
        lora_alpha=r,
        target_modules=_shortest_names(model.get_base_model(), set(factors)),
        task_type=config.task_type,
        base_model_name_or_path=config.base_model_name_or_path or model.get_base_model().__dict__.get("name_or_path"),
        fan_in_fan_out=layers[0][1].fan_in_fan_out,
        modules_to_save=config.modules_to_save,
        inference_mode=True,
    ).save_pretrained(str(path))
    save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})
    report = {"converted_from": "frameft", "rank": r, "relative_error": errors}
    (path / "conversion.json").write_text(json.dumps(report, indent=2) + "\n")
    return errors


def _truncated(b: Tensor, a: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best rank-`rank` approximation of b a, as factors, and its relative error in the Frobenius norm."""
    (qb, rb), (qa, ra) = torch.linalg.qr(b), torch.linalg.qr(a.t())
    u, sigma, vt = torch.linalg.svd(rb @ ra.t(), full_matrices=False)
    size = sigma.norm().item()
    error = sigma[rank:].norm().item() / size if size else 0.0
    return qb @ (u[:, :rank] * sigma[:rank]), vt[:rank] @ qa.t(), error


def _shortest_names(base: nn.Module, adapted: set[str]) -> list[str]:
    """Last parts of the adapted modules' names where these are enough to tell them from the others, else whole names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    others = (name for name, module in base.named_modules() if name not in adapted and ".base_layer" not in name)
    clash = any(name.rpartition(".")[2] in ends for name in others)
    return sorted(adapted if clash else ends)
