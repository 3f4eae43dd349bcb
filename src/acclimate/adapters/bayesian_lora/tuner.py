"""The layer and the model behind `peft.get_peft_model`."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from acclimate.adapters._register import register_tuner
from acclimate.adapters._weights import plain_weight
from acclimate.adapters.bayesian_lora.config import BayesianLoraConfig
from acclimate.adapters.bayesian_lora.posterior import Factor, FactorPosterior, FactorStack

Sampling = Literal["off", "batch", "per_example"]
SAMPLING = ("off", "batch", "per_example")


class _Draws(dict[str, dict[str, Tensor]]):
    """Drawn factors by adapter and "A" or "B". They belong to a forward pass: a copy of the model starts without."""

    def __reduce__(self) -> Any:
        return _Draws, ()


class BayesianLoraLayer(nn.Module, BaseTunerLayer):
    """A `torch.nn.Linear` with a Bayesian LoRA beside it.

    `sampling` is None (draw in training, the mean otherwise), or "off", "batch" (one draw, shared by the batch) or "per_example", which
    then count in training and evaluation alike; set it with `set_sampling`.
    """

    adapter_layer_names = ("blora_A", "blora_B", "blora_posterior_A", "blora_posterior_B")
    other_param_names = ("configs", "draws")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: BayesianLoraConfig, name: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self.blora_A, self.blora_B = nn.ModuleDict(), nn.ModuleDict()
        self.blora_posterior_A, self.blora_posterior_B = nn.ModuleDict(), nn.ModuleDict()
        self.configs: dict[str, BayesianLoraConfig] = {}
        self.draws = _Draws()
        self.sampling: Sampling | None = None
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BayesianLoraConfig) -> None:
        base: Any = self.get_base_layer()
        self.configs[adapter_name] = config
        if config.parameterization == "tied":
            # built and started as PEFT's LoRA, so that the same seed gives the same factors
            a, b = nn.Linear(base.in_features, config.r, bias=False), nn.Linear(config.r, base.out_features, bias=False)
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            nn.init.zeros_(b.weight)
            self.blora_A[adapter_name], self.blora_B[adapter_name] = a, b
        with torch.random.fork_rng(
            devices=[]
        ):  # a stream of its own: the next layer's LoRA starts as if this were not there
            torch.manual_seed(int(torch.randint(2**62, (), device="cpu")))
            self.blora_posterior_A[adapter_name] = FactorPosterior(config, base.in_features, "A")
            self.blora_posterior_B[adapter_name] = FactorPosterior(config, base.out_features, "B")
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _freeze_non_trainable_peft_weights(self, adapter_names: Any = None) -> None:
        for name, config in self.configs.items():
            for posterior in (self.blora_posterior_A[name], self.blora_posterior_B[name]):
                assert isinstance(posterior, FactorPosterior)
                for parameter in posterior.frozen():
                    parameter.requires_grad_(False)
            if config.train == "posterior" and name in self.blora_A:
                self.blora_A[name].requires_grad_(False)
                self.blora_B[name].requires_grad_(False)

    def mode(self, adapter_name: str) -> Sampling:
        """What a forward pass does now."""
        config = self.configs[adapter_name]
        if not config.random:
            return "off"
        if self.sampling is not None:
            return self.sampling
        # a reference model in training (DPO) runs without gradients, and should be the mean
        learns = self.training and torch.is_grad_enabled() and config.train != "mean"
        return "batch" if learns else "off"

    def factor(self, adapter_name: str, which: Literal["A", "B"]) -> Factor:
        posterior: Any = getattr(self, f"blora_posterior_{which}")[adapter_name]
        mean: Any = getattr(self, f"blora_{which}")
        weight = mean[adapter_name].weight if adapter_name in mean else None
        return Factor(self, which, posterior, weight.mT if weight is not None and which == "B" else weight)

    def mean_factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A (r, in) and B (out, r) of the posterior mean."""
        a, b = self.factor(adapter_name, "A"), self.factor(adapter_name, "B")
        means = [f.weight if f.weight is not None else FactorStack([f]).mean()[0] for f in (a, b)]
        return means[0], means[1].mT

    def drawn_factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        drawn = self.draws.get(adapter_name, {})
        if len(drawn) < 2:
            raise RuntimeError(
                f"'{self.name}' has no drawn weights: with sampling on, call the PEFT model (all layers are drawn together "
                'before its forward pass), or use set_sampling(model, "off")'
            )
        return drawn["A"], drawn["B"].mT

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """(alpha/r) B A of the mean, (out, in)."""
        a, b = self.mean_factors(adapter_name)
        return (b @ a) * self.configs[adapter_name].scaling

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.configs:
                weight = plain_weight(self.get_base_layer(), "Bayesian-LoRA")
                merged = weight.data + self.get_delta_weight(name).to(weight.dtype)
                if safe_merge and not torch.isfinite(merged).all():
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
                weight.data = merged
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            weight = plain_weight(self.get_base_layer(), "Bayesian-LoRA")
            weight.data = weight.data - self.get_delta_weight(self.merged_adapters.pop()).to(weight.dtype)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        for name in self.active_adapters:
            if name not in self.configs:
                continue
            drawn = self.mode(name) != "off"
            a, b = self.drawn_factors(name) if drawn else self.mean_factors(name)
            x = x.to(a.dtype)
            if drawn and len(a) == 1:
                a, b = a[0], b[0]
            result = (
                result
                + (F.linear(F.linear(x, a), b) if a.ndim == 2 else _by_draw(x, a, b)) * self.configs[name].scaling
            )
        return result.to(dtype)


def _by_draw(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x (K*m, ..., in) through K different factor pairs, a (K, r, in) and b (K, out, r); the first m rows use the first pair."""
    if x.shape[0] % len(a):
        raise ValueError(f"{len(a)} draws do not divide a batch of {x.shape[0]} rows evenly")
    rows = x.reshape(len(a), -1, x.shape[-1])
    return (rows @ a.mT @ b.mT).reshape(*x.shape[:-1], b.shape[1])


class BayesianLoraModel(BaseTuner):
    """Puts `BayesianLoraLayer` in place of the target modules. Use it through `peft.get_peft_model`."""

    prefix = "blora_"
    tuner_layer_cls = BayesianLoraLayer
    target_module_mapping: dict[str, list[str]] = {k: list(v) for k, v in LORA_TARGETS.items()}  # noqa: RUF012, PEFT's type
    undecayed = ("blora_posterior_",)  # weight decay would pull the noise towards half of its maximum
    _held = False
    _layers: list[BayesianLoraLayer] | None = None  # found once: walking a large model costs as much as drawing

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        # on the wrapped model, since not every way to call a PEFT model passes through the tuner
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

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
        assert isinstance(peft_config, BayesianLoraConfig)
        if isinstance(target, BayesianLoraLayer):
            target.update_layer(adapter_name, peft_config)
            return
        if not isinstance(target, nn.Linear):
            raise TypeError(
                f"bayesian-lora can only be put on torch.nn.Linear; '{current_key}' is {type(target).__name__}"
            )
        layer = BayesianLoraLayer(target, adapter_name, peft_config, current_key)
        self._layers = None
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def layers(self) -> list[BayesianLoraLayer]:
        if self._layers is None:
            self._layers = [module for module in self.model.modules() if isinstance(module, BayesianLoraLayer)]
        return self._layers

    def stacks(self, adapter_name: str) -> Iterator[FactorStack]:
        """The adapter's factors, stacked by shape, in the order of the layers."""
        groups: dict[tuple[Any, ...], list[Factor]] = defaultdict(list)
        for layer in self.layers():
            if adapter_name in layer.configs:
                for factor in (layer.factor(adapter_name, "A"), layer.factor(adapter_name, "B")):
                    posterior = factor.posterior
                    groups[posterior.shape, posterior.scale, posterior.rank_noise.device].append(factor)
        for factors in groups.values():
            yield FactorStack(factors)

    def draw(self, draws: int, generator: torch.Generator | None = None) -> None:
        """Give every layer `draws` new draws of its active adapters' factors."""
        for name in self.active_adapters:
            for stack in self.stacks(name):
                if not stack.config.random:
                    continue  # nothing to draw: the layers use the mean, and the generator is left alone
                for factor, one in zip(stack.factors, stack.draw(draws, generator).unbind(0), strict=True):
                    factor.layer.draws.setdefault(name, {})[factor.which] = one

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = self.mode()
        if mode != "off" and not self._held:
            self.draw(1 if mode == "batch" else _rows(args, kwargs))

    def mode(self) -> Sampling:
        """What the next forward pass does, for the model as a whole."""
        for layer in self.layers():
            if layer.disable_adapters or layer.merged:
                return "off"
            for name in self.active_adapters:
                if name in layer.configs and (mode := layer.mode(name)) != "off":
                    return mode
        return "off"

    @contextmanager
    def posterior_samples(self, draws: int, generator: torch.Generator | None = None) -> Iterator[None]:
        """Inside, a call of the model on N rows answers with draws x N rows: all rows under the first draw, then the second, ...

        The draws are made once, here: batches do not change them. Blocks below the first adapted one run on N rows only. Use it
        without gradients. Raises ValueError for fewer than one draw.
        """
        if draws < 1:
            raise ValueError(f"n_samples must be at least 1, not {draws}")
        layers = self.layers()
        before = [layer.sampling for layer in layers]
        hooks = []
        try:
            with torch.no_grad():
                self.draw(draws, generator)
            self._held = True
            for layer in layers:
                layer.sampling = "batch"
            hooks = _fold(self.model, draws)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._held = False
            for layer, sampling in zip(layers, before, strict=True):
                layer.sampling = sampling
                layer.draws.clear()

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        self._hook.remove()
        return super()._unload_and_optionally_merge(*args, **kwargs)

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        if any(layer.sampling in ("batch", "per_example") for layer in self.layers()):
            warnings.warn("sampling is on, but a merge has one weight: the posterior mean is merged", stacklevel=4)


register_tuner("bayesian_lora", BayesianLoraConfig, BayesianLoraModel, prefix="blora_")


def _fold(model: nn.Module, draws: int) -> list[Any]:
    """Hooks that repeat a batch `draws` times at the model's input, and run blocks below the first adapted one on a single copy."""
    rows = 0

    def resize(values: Any, found: int, wanted: int) -> Any:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != found:
                return value
            return value[:wanted] if wanted < found else value.repeat(wanted // found, *[1] * (value.ndim - 1))

        return tree_map(one, values)

    def at_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal rows
        rows = _rows(args, kwargs)
        return resize(args, rows, draws * rows), resize(kwargs, rows, draws * rows)

    def below(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return resize(args, draws * rows, rows), resize(kwargs, draws * rows, rows)

    def at_first(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return resize(args, rows, draws * rows), resize(kwargs, rows, draws * rows)

    hooks = [(model, at_input)]
    blocks, first = _adapted_blocks(model)
    if first > 0:
        hooks += [(block, below) for block in blocks[:first]] + [(blocks[first], at_first)]
    return [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]


def _adapted_blocks(model: nn.Module) -> tuple[list[nn.Module], int]:
    """The list of blocks that all adapted layers are in, and the first block that has one; ([], 0) when there is no such list."""
    names = [name for name, module in model.named_modules() if isinstance(module, BayesianLoraLayer)]
    for name, module in model.named_modules():  # parents come first: the outermost list is found
        if isinstance(module, nn.ModuleList) and all(layer.startswith(f"{name}.") for layer in names):
            return list(module), min(int(layer.removeprefix(f"{name}.").split(".")[0]) for layer in names)
    return [], 0


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim)


def tuner_of(model: nn.Module) -> BayesianLoraModel:
    """The Bayesian-LoRA inside a PEFT model, however it is wrapped. Raises TypeError when there is none."""
    for module in model.modules():
        if isinstance(module, BayesianLoraModel):
            return module
    raise TypeError(
        f"{type(model).__name__} has no Bayesian-LoRA; make one with get_peft_model(model, BayesianLoraConfig(...))"
    )


def set_sampling(model: nn.Module, sampling: Sampling | None) -> None:
    """Draw weights in every forward pass ("batch", "per_example") or never ("off"), in train() and eval() alike.

    None is the start: draws in training, the posterior mean otherwise. A forward pass without gradients counts as "otherwise".
    """
    if sampling is not None and sampling not in SAMPLING:
        raise ValueError(f"sampling is None or one of {', '.join(SAMPLING)}, not {sampling!r}")
    for layer in tuner_of(model).layers():
        layer.sampling = sampling
        layer.draws.clear()
