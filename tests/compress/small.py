"""Tiny models and inputs for the tests of compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def llama(blocks: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=blocks, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def ids(sequences: int = 8, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(2, 120, (sequences, length), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs_of(model: nn.Module, names: list[str], batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """(tokens, n) inputs of layers in a plain run of the whole model; tokens that a mask leaves out are left out."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    mask: Any = None

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name].append((args[0][mask] if mask is not None else args[0].flatten(0, -2)).detach().clone())

        return note

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"].bool() if "attention_mask" in batch else None
            model(**batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}
