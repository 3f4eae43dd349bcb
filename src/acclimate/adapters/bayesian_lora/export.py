"""From a plain LoRA, and to plain LoRAs: what stock PEFT and multi-LoRA servers load."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, load_peft_weights
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate.adapters.bayesian_lora.config import BayesianLoraConfig
from acclimate.adapters.bayesian_lora.posterior import FactorStack
from acclimate.adapters.bayesian_lora.tuner import BayesianLoraLayer, tuner_of

SHARED = (  # arguments that both configurations have
    "task_type",
    "base_model_name_or_path",
    "revision",
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
)


def from_lora(model: nn.Module, path: str | Path, **options: Any) -> PeftModel:
    """The model with a Bayesian-LoRA whose mean is the LoRA in `path`.

    Train it on for a few dozen steps: with `train="posterior"` only the noise is learned, which calibrates the adapter as it is.
    `options` are arguments of `BayesianLoraConfig`; rank, alpha and layers are the LoRA's. The tied form copies the factors. The
    published form takes its bases from each factor's thin SVD and its mean by least squares, which is exact.

    Raises ValueError for an adapter that is not a plain LoRA of one rank, and when `inducing` is less than that rank.
    """
    lora = PeftConfig.from_pretrained(str(path))
    if not isinstance(lora, LoraConfig):
        raise ValueError(f"'{path}' holds a {lora.peft_type} adapter; from_lora needs a plain LoRA")
    for name in ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "fan_in_fan_out", "target_parameters"):
        if getattr(lora, name, None):
            raise ValueError(
                f"the LoRA in '{path}' uses {name}, which Bayesian-LoRA does not have. Train one without it"
            )
    alpha = lora.lora_alpha * (math.sqrt(lora.r) if lora.use_rslora else 1)
    shared = {name: getattr(lora, name) for name in SHARED} | {"lora_alpha": alpha}
    config = BayesianLoraConfig(**shared, **options)
    if min(config.inducing_shape) < lora.r:
        raise ValueError(
            f"inducing {config.inducing_shape} is less than the LoRA's rank {lora.r}: it cannot represent the factors"
        )
    wrapped = get_peft_model(model, config)
    weights = load_peft_weights(str(path), device="cpu")
    rest = {key: value for key, value in weights.items() if ".lora_" not in key}
    with torch.no_grad():
        for name, layer in wrapped.named_modules():
            if isinstance(layer, BayesianLoraLayer):
                _copy(layer, weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"])
    if rest:  # heads in modules_to_save
        set_peft_model_state_dict(wrapped, rest)
    return wrapped


def _copy(layer: BayesianLoraLayer, a: Tensor, b: Tensor) -> None:
    for which, value in (("A", a), ("B", b.mT)):
        factor = layer.factor("default", which)  # type: ignore[arg-type]
        if factor.weight is not None:
            factor.weight.copy_(value)
            continue
        posterior: Any = factor.posterior
        left, _, right = torch.linalg.svd(value.to(posterior.mu), full_matrices=False)
        posterior.rank_basis[: left.shape[1]] = left.mT
        posterior.wide_basis[: right.shape[0]] = right
        stack = FactorStack([factor])
        # value = s P_r^T mu P_c
        mu = (
            torch.linalg.pinv(stack.rank.projection[0].mT)
            @ value.to(left)
            @ torch.linalg.pinv(stack.wide.projection[0])
        )
        posterior.mu.copy_(mu / posterior.scale)


def export_mean(model: nn.Module, directory: str | Path, adapter_name: str = "default") -> Path:
    """Write the posterior mean as a plain LoRA folder of the same rank; returns its path."""
    return _write(model, Path(directory), adapter_name, lambda layer: layer.mean_factors(adapter_name))


def export_samples(
    model: nn.Module,
    directory: str | Path,
    n: int,
    adapter_name: str = "default",
    generator: torch.Generator | None = None,
) -> list[Path]:
    """Write `n` draws as plain LoRA folders sample-0, sample-1, ...: average the probabilities they answer with.

    With a generator in the same state they are the draws of `predict_proba(n_samples=n)`. Raises ValueError for n below 1.
    """
    tuner = tuner_of(model)
    if tuner.active_adapters != [adapter_name]:
        raise ValueError(
            f"adapter '{adapter_name}' is not the active one; call model.set_adapter('{adapter_name}') first"
        )
    with torch.no_grad(), tuner.posterior_samples(n, generator):

        def drawn(k: int) -> Callable[[BayesianLoraLayer], tuple[Tensor, Tensor]]:
            def of(layer: BayesianLoraLayer) -> tuple[Tensor, Tensor]:
                if adapter_name not in layer.draws:
                    return layer.mean_factors(adapter_name)
                a, b = layer.drawn_factors(adapter_name)
                return a[k], b[k]

            return of

        return [_write(model, Path(directory) / f"sample-{k}", adapter_name, drawn(k)) for k in range(n)]


@torch.no_grad()
def _write(
    model: nn.Module, directory: Path, adapter_name: str, factors: Callable[[BayesianLoraLayer], tuple[Tensor, Tensor]]
) -> Path:
    config = tuner_of(model).peft_config[adapter_name]
    assert isinstance(config, BayesianLoraConfig)
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    weights = {key: value.contiguous() for key, value in state.items() if ".blora_" not in key}
    for name, layer in model.named_modules():
        if isinstance(layer, BayesianLoraLayer) and adapter_name in layer.configs:
            for which, value in zip("AB", factors(layer), strict=True):
                weights[f"{name}.lora_{which}.weight"] = value.contiguous().clone()
    plain = LoraConfig(**{name: getattr(config, name) for name in SHARED}, inference_mode=True)
    directory.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(str(directory))
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory
