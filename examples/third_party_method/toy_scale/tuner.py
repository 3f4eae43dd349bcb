"""Toy scale: learn how loud each output of a linear layer should be.

A frozen layer y = W x + b (W of shape out x in) becomes y = e^s * (W x + b) with one trained number s per output,
s = 0 at the start, so that the adapter begins as a no-op. e^s is never zero: a merge can always be undone. With several
active adapters the scales multiply.

Source: written for acclimate as the worked example of CONTRIBUTING.md; the smallest tuner with everything PEFT expects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS
from torch import Tensor, nn

from acclimate.adapters._register import register_tuner


@dataclass
class ToyScaleConfig(PeftConfig):
    """`target_modules`: names, a regex or "all-linear"; None takes what LoRA would. `init_std`: spread of s at the start."""

    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)
    init_std: float = field(default=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("TOY_SCALE")
        if self.init_std < 0:
            raise ValueError(f"init_std is a standard deviation and cannot be negative, got {self.init_std}")


def scale_rows(weight: Tensor, log_scale: Tensor) -> Tensor:
    """diag(e^log_scale) @ weight, for weight (out, ...) and log_scale (out,), in weight's dtype."""
    factor = log_scale.exp().reshape(-1, *[1] * (weight.ndim - 1))
    return (weight * factor).to(weight.dtype)


class ToyScaleLinear(nn.Module, BaseTunerLayer):
    """A `torch.nn.Linear` with a trained scale per output and adapter."""

    adapter_layer_names = ("toy_scale_log",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: ToyScaleConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.toy_scale_log = nn.ParameterDict()
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: ToyScaleConfig) -> None:
        log_scale = torch.randn(self._linear().out_features) * config.init_std
        self.toy_scale_log[adapter_name] = nn.Parameter(log_scale)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.toy_scale_log:
                log_scale = self.toy_scale_log[name].detach()
                if safe_merge and not torch.isfinite(log_scale).all():
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
                self._scale_base(log_scale)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self._scale_base(-self.toy_scale_log[self.merged_adapters.pop()].detach())

    def _linear(self) -> nn.Linear:
        base = self.get_base_layer()
        assert isinstance(base, nn.Linear)
        return base

    def _scale_base(self, log_scale: Tensor) -> None:
        base = self._linear()
        base.weight.data = scale_rows(base.weight.data, log_scale)
        if base.bias is not None:
            base.bias.data = scale_rows(base.bias.data, log_scale)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        active = [self.toy_scale_log[name] for name in self.active_adapters if name in self.toy_scale_log]
        return (y * torch.stack(active).sum(0).exp()).to(y.dtype) if active else y


class ToyScaleModel(BaseTuner):
    """Puts `ToyScaleLinear` in place of the target modules. Use it through `peft.get_peft_model`."""

    prefix = "toy_scale_"
    tuner_layer_cls = ToyScaleLinear
    target_module_mapping: dict[str, list[str]] = {k: list(v) for k, v in LORA_TARGETS.items()}  # noqa: RUF012, PEFT's type

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        assert isinstance(peft_config, ToyScaleConfig)
        if isinstance(target, ToyScaleLinear):
            target.update_layer(adapter_name, peft_config)
            return
        if not isinstance(target, nn.Linear):
            raise TypeError(f"toy-scale can only be put on torch.nn.Linear; '{target_name}' is {type(target).__name__}")
        layer = ToyScaleLinear(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(
                False
            )  # as all of PEFT's tuners: an additional adapter is not trained until it is active
        self._replace_module(parent, target_name, layer, target)


register_tuner("toy_scale", ToyScaleConfig, ToyScaleModel, prefix="toy_scale_")
