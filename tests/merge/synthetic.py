"""Adapters made of random numbers, and what they are by definition."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPES = {"layers.0.q_proj": (48, 32), "layers.0.up_proj": (40, 48), "layers.1.q_proj": (48, 32)}
PREFIX = "base_model.model."


def pair(m: int, n: int, r: int, seed: int, common: float = 0.6) -> tuple[Tensor, Tensor]:
    """A (r, n) and B (m, r) in float64; tasks share a part of their directions, as trained adapters do."""
    shared, own = torch.Generator().manual_seed(999), torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        together = torch.randn(64, size[1], generator=shared, dtype=torch.float64)[: size[0]]
        return common * together + torch.randn(*size, generator=own, dtype=torch.float64)

    return draw(r, n) / math.sqrt(n), draw(r, m).T / math.sqrt(m)


def adapter(
    where: Path,
    seed: int,
    r: int = 4,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write a PEFT adapter directory."""
    state = {}
    for number, (name, (m, n)) in enumerate(shapes.items()):
        a, b = pair(m, n, (ranks or {}).get(name, r), 1000 * seed + number)
        state[f"{PREFIX}{name}.lora_A.weight"] = a.to(dtype)
        state[f"{PREFIX}{name}.lora_B.weight"] = b.to(dtype).contiguous()
    return write(where, {**state, **(extra or {})}, r=r, **config)


def write(where: Path, state: Mapping[str, Tensor], **config: Any) -> Path:
    """Write tensors and a configuration as a PEFT adapter directory."""
    where.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), where / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    text = json.dumps({**usual, "base_model_name_or_path": "base", **config})
    (where / "adapter_config.json").write_text(text)
    return where


def deltas(where: Path) -> dict[str, Tensor]:
    """s B A of every module in float64, for adapters without patterns or with them spelled as whole names."""
    config = json.loads((where / "adapter_config.json").read_text())
    state = load_file(where / "adapter_model.safetensors")
    return deltas_of(config, state)


def deltas_of(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for key, a in state.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            r = config.get("rank_pattern", {}).get(name, config["r"])
            alpha = config.get("alpha_pattern", {}).get(name, config["lora_alpha"])
            scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
            result[name] = scale * state[key.replace("lora_A", "lora_B")].double() @ a.double()
    return result


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Largest relative Frobenius distance of two sets of matrices."""
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).norm() / second[key].norm()) for key in second)
