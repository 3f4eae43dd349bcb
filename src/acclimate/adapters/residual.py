"""A LoRA that starts away from zero without touching the base: a second, frozen adapter takes the start away again.

    y = W x + c (B A - B0 A0) x

PEFT runs both adapters at once, so merging, disabling and DDP are its own. `save_pretrained` writes them as one plain LoRA of
twice the rank, A' = [A; A0], B' = [B, -B0], with the same scaling c.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

START = "start"  # name of the frozen adapter


def add_start(peft_model: Any, adapter_name: str = "default") -> None:
    """Add the frozen adapter, to be filled with A0 and -B0, beside `adapter_name`."""
    config = copy.deepcopy(peft_model.peft_config[adapter_name])
    config.modules_to_save = None
    peft_model.peft_config[START] = config
    with torch.random.fork_rng(devices=[]):  # its random numbers are overwritten, so drawing them changes nothing
        peft_model.base_model.inject_adapter(peft_model.base_model.model, START)
    peft_model.base_model.set_adapter([adapter_name, START])
    watch(peft_model, adapter_name)


def watch(peft_model: Any, adapter_name: str = "default") -> None:
    """Freeze the second adapter and let `save_pretrained` of this model write the pair as one LoRA."""
    for name, parameter in peft_model.named_parameters():
        if f".{START}." in name:
            parameter.requires_grad_(False)

    def save_pretrained(
        save_directory: str | Path, *, state_dict: dict[str, Tensor] | None = None, **options: Any
    ) -> None:
        pair: Any = [get_peft_model_state_dict(peft_model, state_dict, name) for name in (adapter_name, START)]
        joined = {
            key: torch.cat([value, pair[1][key]], dim=_rank_axis(key)).contiguous() if "lora_" in key else value
            for key, value in pair[0].items()
        }
        config = doubled(peft_model.peft_config[adapter_name])
        config.inference_mode = True
        config.base_model_name_or_path = getattr(peft_model.get_base_model(), "name_or_path", None)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        save_file(joined, Path(save_directory) / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(save_directory))

    peft_model.save_pretrained = save_pretrained


def is_residual(peft_model: Any) -> bool:
    return START in getattr(peft_model, "peft_config", {})


def doubled(config: LoraConfig) -> LoraConfig:
    """The configuration of twice the rank with the same scaling."""
    factor = math.sqrt(2) if config.use_rslora else 2
    twice: Any = copy.deepcopy(config)
    twice.r, twice.lora_alpha = 2 * config.r, _whole(config.lora_alpha * factor)
    twice.rank_pattern = {name: 2 * rank for name, rank in twice.rank_pattern.items()}
    twice.alpha_pattern = {name: _whole(alpha * factor) for name, alpha in twice.alpha_pattern.items()}
    return twice


def _whole(value: float) -> int:
    return int(value) if value == int(value) else value  # type: ignore[return-value]  # PEFT takes any number


def load(peft_model: Any, directory: str | Path, adapter_name: str = "default") -> None:
    """Put a saved pair back into the two adapters that it came from, to train on."""
    saved = load_file(Path(directory) / "adapter_model.safetensors")
    for place, half in ((adapter_name, 0), (START, 1)):
        part = {
            key: value.chunk(2, dim=_rank_axis(key))[half] if "lora_" in key else value
            for key, value in saved.items()
            if half == 0 or "lora_" in key
        }
        set_peft_model_state_dict(peft_model, part, adapter_name=place)


def _rank_axis(key: str) -> int:
    return 0 if "lora_A" in key else 1
