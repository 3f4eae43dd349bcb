"""What training a model takes besides activations, by formula: weights, gradients, the optimiser's moments and factors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from acclimate.optim.gradient_factors import owners
from acclimate.optim.sharding import local


def memory_account(
    model: nn.Module, optimizer: Literal["io-adam", "adamw"] = "io-adam", *, dtype: torch.dtype | None = None,
    buffer: int = 1, fused: bool = False, embeddings: str = "adam", exclude: Collection[str] = (),
) -> dict[str, int]:  # fmt: skip
    """Bytes of "weights", "grads", "states", "buffers" and "total" that training `model`'s trainable parameters takes.

    By formula: nothing is trained or allocated, and the model may be on the meta device. dtype: of weights, gradients and
    moments (None: each parameter's own).

    >>> memory_account(nn.Linear(100, 50, bias=False), fused=True)
    {'weights': 20000, 'grads': 0, 'states': 20004, 'buffers': 600, 'total': 40604}
    """
    if optimizer not in ("io-adam", "adamw"):
        raise ValueError(f"optimizer is 'io-adam' or 'adamw'; got {optimizer!r}")
    found = owners(model, embeddings == "io", exclude)
    parts = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        kind = found[name].kind if optimizer == "io-adam" else None
        factors = buffer * (p.shape[0] + p[0].numel()) if kind else None
        size = None if dtype is None else dtype.itemsize
        parts.append(parameter_bytes(p, factors, fused and kind in ("linear", "transposed"), itemsize=size))
    return total_bytes(parts)


def parameter_bytes(
    p: Tensor, factors: int | None = None, fused: bool = False, momentum: str | None = None, itemsize: int | None = None
) -> dict[str, int]:
    """One parameter's bytes; `factors` is how many numbers its C and R have, None for AdamW."""
    count, size = local(p).numel(), itemsize or p.element_size()
    if factors is None:
        return {"weights": count * size, "grads": count * size, "states": 2 * count * size + 4, "buffers": 0}
    first = getattr(torch, momentum).itemsize if momentum else size
    grads = 0 if fused else count * size
    return {"weights": count * size, "grads": grads, "states": count * first + 4, "buffers": 4 * factors}


def total_bytes(parts: list[dict[str, int]]) -> dict[str, int]:
    summed = {key: sum(part[key] for part in parts) for key in ("weights", "grads", "states", "buffers")}
    return {**summed, "total": sum(summed.values())}
