"""Tiny models and inputs for the tests of compression."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acclimate.compress import blocks


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


def killed_after_first_block(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do `work` in a process of its own that kills itself when it has saved a block."""
    process = os.fork()
    if process == 0:
        save = blocks._Work._save

        def killed(self: Any, index: int, *rest: Any) -> None:
            save(self, index, *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(blocks._Work, "_save", killed)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def blocks_worked_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that fills with the numbers of the blocks that are worked on from now on, those taken up from files not among them."""
    done: list[int] = []
    whole = blocks._Work._block

    def counted(self: Any, index: int, begun: float) -> None:
        done.append(index)
        whole(self, index, begun)

    monkeypatch.setattr(blocks._Work, "_block", counted)
    return done
