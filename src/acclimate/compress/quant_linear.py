"""A linear layer whose weights are packed codes of 2, 3, 4 or 8 bits, and how transformers saves and loads models that have some.

    y = x Q^T + bias        Q_ij = scale_ig (code_ij - zero_ig), g the group of column j

The tensors are those of GPTQ files (`qweight`, `qzeros`, `scales`, `g_idx`), so that engines with kernels for them (vLLM, gptqmodel) read
the folder as it is. To the transformers library the method is called `acclimate_projq`; it is known once `acclimate.compress` has been
imported. Here the forward pass dequantises, and, with `cache`, keeps the float32 weight. Gradients reach the inputs only. A LoRA on
the layer is an ordinary one; it cannot be merged, since Q + BA is not on the grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from acclimate.compress import quantizer
from acclimate.compress.gptq import Quantized
from acclimate.compress.packing import pack, unpack, words
from acclimate.compress.quantizer import LayerQuantizer, register

NAME = "acclimate_projq"


class QuantLinear(nn.Linear):
    """`in_features` -> `out_features` with packed weights. An nn.Linear to PEFT, with `weight` (m, n) computed anew: writing to it
    changes nothing."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    _like: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not nn.Linear's own, which makes a weight
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.group_size = in_features if group_size == -1 else group_size
        # follows casts of the model: what is computed in
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype or torch.get_default_dtype()), False)
        groups = in_features // self.group_size

        def empty(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.register_buffer("qweight", empty(words(in_features, bits), out_features))
        self.register_buffer("qzeros", empty(groups, words(out_features, bits)))
        self.register_buffer("scales", empty(groups, out_features, kind=torch.float16))
        self.register_buffer("g_idx", empty(in_features))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None  # type: ignore[assignment]
        self.cache = True
        self._dense: Tensor | None = None
        self._made_from: Tensor | None = None
        self._is_hf_initialized = True  # transformers has nothing to draw at random here

    @classmethod
    def from_quantized(cls, found: Quantized, linear: nn.Linear) -> QuantLinear:
        """The layer of `linear` with these weights."""
        m, n = found.codes.shape
        size = n // found.scales.shape[1]
        layer = cls(n, m, found.bits, size, linear.bias is not None, dtype=linear.weight.dtype)
        layer.qweight = pack(found.codes.T, found.bits)
        layer.qzeros = pack((found.zeros - 1), found.bits).T.contiguous()  # GPTQ's files store zero - 1
        layer.scales = found.scales.T.half().contiguous()
        layer.g_idx = found.group_of.to(torch.int32)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return layer.to(linear.weight.device)

    def dequantize(self) -> Tensor:
        """Q (m, n), float32."""
        group = self.g_idx.long()
        codes = unpack(self.qweight, self.bits, self.in_features)
        zeros = unpack(self.qzeros.T, self.bits, self.out_features).T.float() + 1
        return ((codes.float() - zeros[group]) * self.scales.float()[group]).T

    @property
    def dtype(self) -> torch.dtype:
        """Of `weight` and of the bias."""
        return self._like.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        dense = self._dense
        # loaders put new tensors in, and some write to what looks like an ordinary weight
        fresh = dense is not None and self._made_from is self.qweight and not dense._version
        if dense is None or not fresh or dense.device != self.qweight.device or dense.dtype != self.dtype:
            with torch.inference_mode(False), torch.no_grad():
                dense = self.dequantize().to(self.dtype).clone()  # a tensor that nothing has been written to
            if self.cache and not dense.is_meta:
                self._dense, self._made_from = dense, self.qweight
        return dense

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        self.forget()
        stored = self.scales
        super()._apply(fn, recurse)
        self.scales = stored.to(self.scales.device)  # a cast of the model does not change what is stored
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def forget(self) -> None:
        """Let go of the weight that `cache` keeps, until it is needed again."""
        self._dense = self._made_from = None

    def to_dense(self) -> nn.Linear:
        """An ordinary layer with the same weights."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.dequantize().to(self.dtype), requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=False)
        return layer

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}, group_size={self.group_size}"


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


class ProjqConfig(QuantizationConfigMixin):
    """`quantization_config` in config.json: the layers by name, and how their codes are laid out."""

    def __init__(self, bits: int = 3, group_size: int = 64, modules: list[str] | None = None, **facts: Any) -> None:
        self.quant_method = NAME  # type: ignore[assignment]  # transformers' enum of methods is closed
        self.bits, self.group_size, self.modules = bits, group_size, modules or []
        self.facts = facts.get("facts", {k: v for k, v in facts.items() if k != "quant_method"})


class ProjqQuantizer(LayerQuantizer):
    """Builds the quantised layers of a saved model before its weights are read."""

    kind = QuantLinear
    given = "codes for"

    def names(self) -> list[str]:
        modules: list[str] = self.quantization_config.modules  # type: ignore[attr-defined]
        return modules

    def build(self, name: str, old: nn.Linear) -> nn.Module:
        config: Any = self.quantization_config
        shape = (old.in_features, old.out_features, config.bits, config.group_size)
        return QuantLinear(*shape, old.bias is not None, device="meta", dtype=old.weight.dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.quantization_method = "gptq"  # PEFT refuses to merge into such models
        return model


register(NAME, ProjqConfig, ProjqQuantizer)


def mark(model: Any, facts: dict[str, Any]) -> None:
    """Let `save_pretrained` write the packed layers so that `from_pretrained` finds them, and PEFT know that it cannot merge into them."""
    layers = quantized_layers(model)
    assert next(iter(layers.values())).bits == facts["bits"]
    model.quantization_method = "gptq"
    config = ProjqConfig(facts["bits"], facts["group_size"], list(layers), facts=facts)
    quantizer.mark(model, ProjqQuantizer, config)
