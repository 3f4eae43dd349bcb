"""The base weight of an adapted layer, where an adapter may be merged into it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def plain_weight(base: nn.Module, adapter: str) -> Tensor:
    """The layer's weight, if adding to it means what it says.

    Raises NotImplementedError for a quantised layer, of any library: its numbers are codes, not weights.
    """
    weight: Any = getattr(base, "weight", None)
    plain = isinstance(weight, Tensor) and type(weight.data) is Tensor
    if not plain or not weight.is_floating_point() or weight.element_size() < 2:
        raise NotImplementedError(
            f"{adapter} cannot be merged into {type(base).__name__}, whose weight is quantised: load the base model in 16 or "
            "32 bits to merge, or use the adapter beside the weight as it is"
        )
    return weight
