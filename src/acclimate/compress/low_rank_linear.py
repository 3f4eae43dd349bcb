"""A linear layer of two thin ones, and how transformers saves and loads models that have some.

    y = B (A x) + bias        A (r, n), B (m, r)

`mark(model)` notes the ranks in the model's configuration. From then on `save_pretrained` writes the factors, and, once this module has
been imported (`import acclimate.compress`), `AutoModel...from_pretrained` builds the thin layers before it reads them. To the
transformers library it is a quantisation method named `acclimate_lowrank`. `model.dequantize()` and `export_dense` give ordinary layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import Tensor, nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from acclimate.compress import quantizer
from acclimate.compress.quantizer import LayerQuantizer, register, to_dense, unmark
from acclimate.runs import replacing

NAME = "acclimate_lowrank"


class LowRankLinear(nn.Module):
    """y = second(first(x)): `in_features` -> `rank` -> `out_features`; the bias is the second layer's. Attributes as nn.Linear's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= rank <= min(in_features, out_features):
            raise ValueError(
                f"the rank of a {out_features} x {in_features} layer is 1 to {min(in_features, out_features)}, not {rank}"
            )
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.first = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.second = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_factors(cls, B: Tensor, A: Tensor, bias: Tensor | None = None) -> LowRankLinear:
        """The layer of B (m, r) and A (r, n), in their type."""
        layer = cls(A.shape[1], B.shape[0], A.shape[0], bias is not None, device="meta", dtype=A.dtype)
        layer.first.weight = nn.Parameter(A.contiguous())
        layer.second.weight = nn.Parameter(B.contiguous())
        if bias is not None:
            layer.second.bias = nn.Parameter(bias.detach().clone().to(B))
        return layer

    @property
    def weight(self) -> Tensor:
        """B A (m, n), computed anew: for tools that read it. Writing to it changes nothing."""
        return self.second.weight @ self.first.weight

    @property
    def bias(self) -> Tensor | None:
        return self.second.bias

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """An ordinary layer with the same function; the product is taken in float64."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        product = (self.second.weight.double() @ self.first.weight.double()).to(self.first.weight.dtype)
        layer.weight = nn.Parameter(product)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone())
        return layer

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankLinear)}


class LowRankConfig(QuantizationConfigMixin):
    """`quantization_config` in config.json: the rank of every low-rank layer by its name."""

    def __init__(self, ranks: dict[str, int] | None = None, **unknown: Any) -> None:
        self.quant_method = NAME  # type: ignore[assignment]  # transformers' enum of methods is closed
        self.ranks = ranks or {}


class LowRankQuantizer(LayerQuantizer):
    """Builds the low-rank layers of a saved model before its weights are read."""

    kind = LowRankLinear
    given = "a rank for"

    def names(self) -> dict[str, int]:
        ranks: dict[str, int] = self.quantization_config.ranks  # type: ignore[attr-defined]
        return ranks

    def build(self, name: str, old: nn.Linear) -> nn.Module:
        rank = self.names()[name]
        return LowRankLinear(
            old.in_features, old.out_features, rank, old.bias is not None, device="meta", dtype=old.weight.dtype
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.is_quantized = False  # its weights are ordinary numbers: .half() and training are as for any model
        return model

    @property
    def is_qat_trainable(self) -> bool:
        return True


register(NAME, LowRankConfig, LowRankQuantizer)


def mark(model: Any) -> None:
    """Let `save_pretrained` of a transformers model write its low-rank layers so that `from_pretrained` finds them."""
    ranks = {name: layer.rank for name, layer in low_rank_layers(model).items()}
    if ranks:
        quantizer.mark(model, LowRankQuantizer, LowRankConfig(ranks))


def export_dense(model: Any, directory: str | Path) -> Path:
    """Write an ordinary checkpoint of the original architecture, for engines that know no low-rank layers: the same answers, at the
    original's size and speed. Returns the directory; the model stays as it is."""
    dense = copy.deepcopy(model)
    to_dense(dense, LowRankLinear)
    unmark(dense)
    with replacing(Path(directory)) as temporary:
        dense.save_pretrained(temporary)
    return Path(directory)


class LoraOnLowRank(lora.Linear):
    """A LoRA beside the whole of a low-rank layer. It cannot be merged, since its sum with B A has a higher rank."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:  # PEFT's own warns of types that it does not know
        return module.in_features, module.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise NotImplementedError(
            "a LoRA beside a low-rank layer cannot be merged into its two factors. Use it as an adapter, or turn the model's "
            "layers into dense ones first (export_dense)"
        )


def lora_config(**options: Any) -> LoraConfig:
    """A `LoraConfig` whose `target_modules` may be low-rank layers as a whole. Give it to `PeftModel.from_pretrained` as `config` as
    well. (An ordinary `LoraConfig` puts adapters on the two thin layers inside.)"""
    config = LoraConfig(**options)
    config._register_custom_module({LowRankLinear: LoraOnLowRank})
    return config
