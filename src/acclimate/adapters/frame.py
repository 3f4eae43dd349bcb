"""FrameFT: learn a few hundred numbers per layer, the coefficients of the weight's change in a fixed tight frame.

Layer W (d_out x d_in); its change is

    dW = c F_out^T S F_in,    c = scale / sqrt(d_out d_in),

with tight fusion frames F_out, F_in (acclimate.adapters.tight_frames) generated from three integers, and a sparse S of
`n_coefficients` trained numbers s at fixed positions. Frames are neither trained nor saved; s starts at zero, so that training
begins at the base model. `basis` replaces both frames by Haar orthogonal matrices or by the identity, to see what they do.

    forward    u = F_in x,  v = S u,  y = base(x) + c F_out^T v
    backward   h = c F_out g,  ds = sum_t h[t, row] u[t, col],  dx = F_in^T S^T h

No d_out x d_in matrix is formed. Only the distinct rows and columns of S take part, and of the forward pass only u at those
columns is kept (`recompute` keeps x instead, which the layer's neighbours usually share). For a square frame F x is an FFT, or a
product with one small Fourier block; else the needed rows of F are a (sparse) matrix. c F^T F = c makes training well behaved:
the loss in s is at most c^2 times as curved as in W, so gradient descent with step 1/(c^2 smoothness) descends.

At scale: coefficients and positions are replicated, gradients averaged (a few kilobytes a layer); frames are generated on every
rank. Positions depend on seed, shape and library version only, and are saved with the adapter in case generators change.

Source: "Fine-Tuning of Transformer models with Frames" (FrameFT), ICML 2026.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, AuxiliaryTrainingWrapper, PeftType
from peft.utils.other import get_pattern_key, transpose
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from acclimate.adapters._register import register_tuner
from acclimate.adapters._weights import plain_weight
from acclimate.adapters.sparse_update import SparseUpdate, Transform, shared_update
from acclimate.adapters.tight_frames import Basis, BasisName, SupportName, draw_positions

LR_TIMES_SCALE = 4.0  # published: 0.078 x 50 at width 768, 0.03 x 200 for Llama-2-7B


@dataclass
class FrameFTConfig(PeftConfig):
    """Settings of FrameFT.

    n_coefficients: trained numbers per layer ("compact" rounds down to a square).
    scale: factor of the change; lr * scale near 4 works, see `suggest_lr`.
    frame_l: dimension of the frame's subspaces; "auto" is the even divisor of the layer's width nearest to its root, 2 the
        published setting (a dense Fourier basis).
    redundancy: frame vectors per dimension; above 1 there are more positions than weights.
    support: "random" positions, inside "block" diagonal blocks (`num_blocks` of them; published instruction tuning: 128), or
        "compact": a full sub-grid, which makes the change a low-rank matrix and converts exactly to LoRA (`to_lora`).
    share_support: one set of positions for all layers of a shape.
    basis: "frame", "random" (Haar orthogonal) or "identity".
    init_std: standard deviation of the first coefficients; 0 starts at the base model.
    n_coefficients_pattern, scale_pattern: other values for modules whose names match a key (a regular expression).
    recompute: less memory for more time, see above.
    transform: how square frames are applied. "auto" is a fixed rule (FFT or block product, by size and device), so that the same
        machine always rounds in the same way; "timed" measures once per process, device, dtype and size; or "fft", "gemm".
    target_modules (None: the query and value projections), exclude_modules, layers_to_transform, layers_pattern,
    modules_to_save, fan_in_fan_out: as in PEFT's LoraConfig.

    Raises ValueError for values out of range.
    """

    n_coefficients: int = 1000
    scale: float = 50.0
    frame_l: int | Literal["auto"] = "auto"
    redundancy: float = 1.0
    support: SupportName = "random"
    num_blocks: int | None = None
    share_support: bool = True
    seed: int = 0
    basis: BasisName = "frame"
    init_std: float = 0.0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    fan_in_fan_out: bool = False
    n_coefficients_pattern: dict[str, int] = field(default_factory=dict)
    scale_pattern: dict[str, float] = field(default_factory=dict)
    recompute: bool = False
    transform: Transform = "auto"
    positions_sha256: str | None = None  # written when the adapter is saved

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("FRAMEFT")
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))
        if isinstance(self.target_modules, str) and (self.layers_to_transform is not None or self.layers_pattern):
            raise ValueError("layers_to_transform and layers_pattern need target_modules as a list of names")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern says where to count, so layers_to_transform must be given, too")
        for name, known in (("support", SupportName), ("basis", BasisName), ("transform", Transform)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} is one of {', '.join(get_args(known))}; got {getattr(self, name)!r}")
        counts = {"n_coefficients": self.n_coefficients, **self.n_coefficients_pattern}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: the number of coefficients must be at least 1, got {count}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.redundancy < 1 or (self.redundancy != 1 and self.basis != "frame"):
            raise ValueError(f"redundancy is 1 or more, and 1 for basis='{self.basis}'; got {self.redundancy}")
        if min(self.scale, *self.scale_pattern.values(), math.inf) <= 0:
            raise ValueError(f"scale must be positive, got {self.scale} {self.scale_pattern or ''}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.frame_l != "auto" and (not isinstance(self.frame_l, int) or self.frame_l < 2 or self.frame_l % 2):
            raise ValueError(f"frame_l is 'auto' or an even number of at least 2, got {self.frame_l!r}")


def suggest_lr(config: FrameFTConfig) -> float:
    """The learning rate for Adam that keeps lr * scale at the published value, 4 / scale: 0.08 for the default scale."""
    return LR_TIMES_SCALE / config.scale


# --- PEFT's interface ---


@dataclass(frozen=True)
class _Settings:
    """What one adapter is on one layer, besides its tensors."""

    bases: tuple[Basis, Basis]
    factor: float
    recompute: bool
    transform: Transform
    key: str  # of its positions in the saved file


class FrameFTLinear(nn.Module, BaseTunerLayer):
    """A linear layer (of any class, also quantised) with FrameFT adapters beside it."""

    adapter_layer_names = ("frameft_coefficients",)
    other_param_names = ("frameft_positions", "frameft_settings", "frameft_updates")

    def __init__(self, base_layer: nn.Module, in_features: int, out_features: int, fan_in_fan_out: bool) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = in_features, out_features
        self.fan_in_fan_out = fan_in_fan_out
        self.frameft_coefficients = nn.ParameterDict()
        self.frameft_positions = BufferDict({}, persistent=True)
        self.frameft_settings: dict[str, _Settings] = {}
        self.frameft_updates: dict[str, SparseUpdate] = {}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self.register_load_state_dict_post_hook(_forget_updates)  # the positions may be others now

    def update_layer(self, adapter_name: str, config: FrameFTConfig, name: str) -> None:
        """Give the layer the adapter `adapter_name`; `name` is the layer's own. Raises ValueError when it does not fit."""
        count = config.n_coefficients_pattern.get(
            get_pattern_key(list(config.n_coefficients_pattern), name), config.n_coefficients
        )
        scale = config.scale_pattern.get(get_pattern_key(list(config.scale_pattern), name), config.scale)
        sizes = self.out_features, self.in_features
        try:
            out, into = (Basis.of(config.basis, n, config.frame_l, config.redundancy, config.seed) for n in sizes)
            salt = "" if config.share_support else f" {name}"
            shape = out.count, into.count
            positions = draw_positions(config.support, shape, count, config.seed, config.num_blocks, salt)
        except ValueError as error:
            raise ValueError(f"module '{name}' ({sizes[0]} x {sizes[1]}): {error}") from None
        shared = f"{sizes[0]}x{sizes[1]}x{positions.shape[1]}"
        self.frameft_settings[adapter_name] = _Settings(
            bases=(out, into),
            factor=scale / math.sqrt(sizes[0] * sizes[1]),
            recompute=config.recompute,
            transform=config.transform,
            key=shared if config.share_support else name.replace(".", "/"),
        )
        # tensors are made where PEFT says (the meta device with low_cpu_mem_usage), the positions are always real
        coefficients = torch.empty(positions.shape[1], dtype=torch.float32)
        self.frameft_coefficients[adapter_name] = nn.Parameter(coefficients.normal_(0.0, config.init_std))
        self.frameft_positions[adapter_name] = torch.from_numpy(positions)
        self.frameft_updates.pop(adapter_name, None)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # the device only: coefficients stay in float32, they are few
        tensors = (*self.get_base_layer().parameters(), *self.get_base_layer().buffers())
        device = device or next((tensor.device for tensor in tensors), torch.device("cpu"))
        coefficients = self.frameft_coefficients[adapter_name]
        if coefficients.device not in (device, torch.device("meta")):
            moved = nn.Parameter(coefficients.detach().to(device), coefficients.requires_grad)
            self.frameft_coefficients[adapter_name] = moved
        if device.type != "meta":
            self.frameft_positions[adapter_name] = self.frameft_positions[adapter_name].to(device)

    def sparse_update(self, adapter: str, dtype: torch.dtype, device: torch.device) -> SparseUpdate:
        """What applies the adapter's change, made on first use and after a change of place."""
        found = self.frameft_updates.get(adapter)
        if found is None or found.dtype != dtype or found.device != device:
            settings = self.frameft_settings[adapter]
            found = shared_update(self.frameft_positions[adapter], settings.bases, dtype, device, settings.transform)
            self.frameft_updates[adapter] = found
        return found

    def change(self, x: Tensor, adapter: str) -> Tensor:
        """What the adapter adds to the layer's output for x. Computed in float32 at least."""
        s, settings = self.frameft_coefficients[adapter], self.frameft_settings[adapter]
        dtype = torch.promote_types(torch.promote_types(x.dtype, s.dtype), torch.float32)
        update = self.sparse_update(adapter, dtype, x.device)
        return update(x.to(dtype), settings.factor * s.to(dtype), settings.recompute)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The change as a matrix (d_out, d_in)."""
        s = self.frameft_coefficients[adapter].detach()
        dtype = torch.promote_types(s.dtype, torch.float32)
        return self.sparse_update(adapter, dtype, s.device).dense(self.frameft_settings[adapter].factor * s.to(dtype))

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the changes of the adapters (None: the active ones) to the base weight.

        Raises NotImplementedError for a quantised base, ValueError with `safe_merge` when the result is not finite.
        """
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter not in self.frameft_coefficients:
                continue
            weight = plain_weight(self.get_base_layer(), "FrameFT")
            merged = weight.data + self._oriented_change(adapter, weight)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
            weight.data = merged
            self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Take the merged changes out of the base weight again."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            if adapter in self.frameft_coefficients:
                weight = plain_weight(self.get_base_layer(), "FrameFT")
                weight.data = weight.data - self._oriented_change(adapter, weight)

    def _oriented_change(self, adapter: str, weight: Tensor) -> Tensor:
        return transpose(self.get_delta_weight(adapter), self.fan_in_fan_out).to(weight)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if adapter_names is not None and self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        if adapter_names is not None:
            return self._add_by_row(result, x, adapter_names)
        for adapter in self.active_adapters:
            if adapter in self.frameft_coefficients:
                result = result + self.change(x, adapter).to(result.dtype)
        return result

    def _add_by_row(self, result: Tensor, x: Tensor, adapter_names: list[str]) -> Tensor:
        if len(x) != len(adapter_names):
            raise ValueError(
                f"Length of `adapter_names` should be the same as the number of inputs, but got {len(adapter_names)} "
                f"and {len(x)} respectively."
            )
        for adapter in dict.fromkeys(adapter_names):
            if adapter in self.frameft_coefficients:
                rows = torch.tensor([i for i, name in enumerate(adapter_names) if name == adapter], device=x.device)
                result = result.index_add(0, rows, self.change(x[rows], adapter).to(result.dtype))
        return result

    def __repr__(self) -> str:
        return "frameft." + super().__repr__()


def _forget_updates(layer: FrameFTLinear, incompatible_keys: Any) -> None:
    layer.frameft_updates.clear()


class FrameFTModel(BaseTuner):
    """Puts FrameFT beside the linear layers that the configuration targets."""

    prefix = "frameft_"
    tuner_layer_cls = FrameFTLinear
    # LoRA's: the query and value projections of each architecture
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # type: ignore[assignment]

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        kind = model_config.get("model_type")
        if peft_config.target_modules is None and kind not in self.target_module_mapping:
            raise ValueError(
                f"PEFT does not know the query and value projections of the architecture '{kind}': set target_modules to a list "
                "of module names, or to 'all-linear'"
            )
        return super()._prepare_adapter_config(peft_config, model_config)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, FrameFTLinear):
            target.update_layer(adapter_name, peft_config, current_key)
            return
        base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, Conv1D):
            (into, out), stored_transposed = base.weight.shape, True
        elif hasattr(base, "in_features") and hasattr(base, "out_features"):
            into, out, stored_transposed = base.in_features, base.out_features, peft_config.fan_in_fan_out
            if isinstance(base, nn.Linear) and stored_transposed:
                warnings.warn(f"'{current_key}' is a torch.nn.Linear, so fan_in_fan_out is set to False.", stacklevel=2)
                stored_transposed = peft_config.fan_in_fan_out = False
        else:
            raise TypeError(
                f"FrameFT adapts linear layers; module '{current_key}' is a {type(base).__name__}. Leave it out of "
                "target_modules, or name it in exclude_modules"
            )
        layer = FrameFTLinear(target, into, out, stored_transposed)
        layer.update_layer(adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)  # an additional adapter is not trained until it is chosen
        # update_layer has put the tensors in place already, also for bases whose weight is no tensor
        setattr(parent, target_name, layer)

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Hand `adapter_names` (an adapter per row of the batch) to the layers, as PEFT's LoRA does."""
        names = kwargs.get("adapter_names")
        if names is None:
            yield
            return
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        unknown = sorted({*names} - {"__base__", *self.peft_config})
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
        beams = kwargs.get("num_beams") or 1
        encoder = self.model.get_encoder() if hasattr(self.model, "get_encoder") else None
        # beam search repeats the rows, but not in an encoder (decoders give themselves as their encoder)
        unrepeated = set(encoder.modules()) if encoder not in (None, self.model) else set()
        handles = []
        for module in self.modules():
            if isinstance(module, FrameFTLinear | AuxiliaryTrainingWrapper):
                own = list(names) if module in unrepeated else [name for name in names for _ in range(beams)]
                handles.append(module.register_forward_pre_hook(partial(_hand_over, own), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Saved are a layer's coefficients beside `<prefix>frameft_positions/<key>`, one for each shape if shared.

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        found = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        kept = {k: v.float() if v.dtype.itemsize < 4 else v for k, v in found.items() if ".frameft_positions." not in k}
        positions = {
            settings.key: layer.frameft_positions[adapter_name]
            for _, layer, settings in adapted_layers(model, adapter_name)
        }
        config.positions_sha256 = positions_checksum(positions)
        return kept | {_position_key(key): value for key, value in positions.items()}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        layers = list(adapted_layers(model, adapter_name))
        wanted = {settings.key for _, _, settings in layers}
        saved = {key: state_dict[_position_key(key)] for key in wanted if _position_key(key) in state_dict}
        if wanted - saved.keys() or (config.positions_sha256 and positions_checksum(saved) != config.positions_sha256):
            _discard(model, adapter_name)
            raise RuntimeError(
                "the positions of the FrameFT coefficients do not match the checksum in adapter_config.json"
                + (f" (no positions for {', '.join(sorted(wanted - saved.keys()))})" if wanted - saved.keys() else "")
                + ": the two files do not belong together, or one is damaged. Nothing was loaded"
            )
        rest = {key: value for key, value in state_dict.items() if _POSITIONS not in key}
        loaded = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, rest)
        for name, _, settings in layers:
            loaded[f"{name}.frameft_positions.{adapter_name}"] = saved[settings.key]
        return loaded


_POSITIONS = "frameft_positions/"


def _position_key(key: str) -> str:
    return f"base_model.model.{_POSITIONS}{key}"


def _hand_over(names: list[str], module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "adapter_names": names}


def adapted_layers(model: nn.Module, adapter_name: str) -> Iterator[tuple[str, FrameFTLinear, _Settings]]:
    """The layers that have the adapter, with their names and settings."""
    for name, layer in model.named_modules():
        if isinstance(layer, FrameFTLinear) and adapter_name in layer.frameft_settings:
            yield name, layer, layer.frameft_settings[adapter_name]


def _discard(model: Any, adapter_name: str) -> None:
    """Take an adapter that could not be loaded out of the model again."""
    if len(model.peft_config) > 1:
        model.delete_adapter(adapter_name)
    elif hasattr(model, "unload"):
        model.unload()


def positions_checksum(positions: dict[str, Tensor]) -> str:
    """SHA-256 over the names, shapes and values of position tensors, in the order of the names."""
    digest = hashlib.sha256()
    for key in sorted(positions):
        value = positions[key].detach().cpu().to(torch.int32).contiguous().numpy()
        digest.update(f"{key} {value.shape} ".encode() + value.astype("<i4").tobytes())
    return digest.hexdigest()


register_tuner("frameft", FrameFTConfig, FrameFTModel, prefix="frameft_")
