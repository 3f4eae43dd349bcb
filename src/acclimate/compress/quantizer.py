"""How transformers saves models with layers of our own kinds, and builds those layers again before it reads their weights.

To the transformers library each kind is a quantisation method: a `quantization_config` in config.json, and a quantiser registered for
it. A kind says which layers there are and how one is built; the rest is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


class LayerQuantizer(HfQuantizer):
    """Puts layers of one kind in the places of ordinary ones."""

    requires_calibration = True
    kind: ClassVar[type[nn.Module]]
    given: ClassVar[str]  # what config.json says of a layer, for messages

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The layers that config.json tells of."""

    @abstractmethod
    def build(self, name: str, old: nn.Linear) -> nn.Module:
        """The layer of that name, without memory, in the place of `old`."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        known = dict(model.named_modules())
        start = f"{model.base_model_prefix}."
        for name in self.names():
            # a model saved with its head is loaded without, or the other way round
            place = next((n for n in (name, name.removeprefix(start), start + name) if n in known), None)
            if place is None:
                raise ValueError(f"config.json gives {self.given} '{name}', which {type(model).__name__} does not have")
            old: Any = known[place]
            model.set_submodule(place, self.build(name, old))
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        to_dense(model, self.kind)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def register(name: str, config: type[QuantizationConfigMixin], quantizer: type[LayerQuantizer]) -> None:
    """Let `from_pretrained` know the method `name`."""
    if name not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(name)(config)
        register_quantizer(name)(quantizer)


def to_dense(model: nn.Module, kind: type[nn.Module]) -> None:
    """Put an ordinary layer, its `to_dense()`, in the place of every one of a kind."""
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(name, module.to_dense())  # type: ignore[operator]


def mark(model: Any, quantizer: type[LayerQuantizer], config: QuantizationConfigMixin) -> None:
    """Let `save_pretrained` of a transformers model write its layers so that `from_pretrained` finds them."""
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        model.config.quantization_config = config
        model.hf_quantizer = quantizer(config)


def unmark(model: Any) -> None:
    """Undo `mark`, once the layers are ordinary ones."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        del model.config.quantization_config
        model.hf_quantizer = model.quantization_method = None
        model.is_quantized = False
