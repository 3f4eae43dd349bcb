"""Train and score only the last blocks of a model: the hidden states below them are computed once and kept.

While the lower blocks are frozen, what they make of a text never changes. `FrozenPrefixCache` stores it for a set of rows,
and `suffix_model` is the rest of the model: its last blocks, final norm and head, in the model's own class, fed with the
stored states as `inputs_embeds`. PEFT, Trainer and everything else that takes the whole model takes it too.

    cache = FrozenPrefixCache(model, n_last=10, rows=token_ids)
    suffix = get_peft_model(suffix_model(model, n_last=10), LoraConfig(target_modules=["q_proj", "v_proj"]))
    logits = suffix(**cache.batch([0, 1, 2])).logits

Exact for models whose embeddings go into the first block as they are, at positions that count from 0 (Llama, Mistral,
Qwen and their kin); anything else is found out by comparing the two on a probe, and refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acclimate.runs import replacing

PROBE_TOLERANCE = 1e-4  # of the largest logit


def blocks(model: Any) -> tuple[Any, str]:
    """(module, attribute) that hold the model's list of transformer blocks. Raises ValueError when there is not exactly one."""
    count = getattr(model.config, "num_hidden_layers", None)
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of {count} blocks; a frozen prefix needs a decoder-only model with one"
        )
    return found[0]


def suffix_model(model: Any, n_last: int) -> Any:
    """A copy of the last `n_last` blocks, norm and head as a model of the same class; `inputs_embeds` (B, T, d) are the states
    that enter the first of them. Parameters are copies, so that adapters on it leave `model` alone.

    Raises ValueError when `n_last` is out of range or the states are not all that the upper blocks need.
    """
    parent, name = blocks(model)
    layers = getattr(parent, name)
    if not 0 < n_last <= len(layers):
        raise ValueError(f"n_last must be 1 to {len(layers)}, the number of blocks, not {n_last}")
    try:
        setattr(parent, name, layers[len(layers) - n_last :])
        suffix = copy.deepcopy(model)
    finally:
        setattr(parent, name, layers)
    suffix.config.num_hidden_layers = n_last
    suffix.config.use_cache = False
    if getattr(suffix.config, "layer_types", None):
        suffix.config.layer_types = suffix.config.layer_types[-n_last:]
    suffix_parent, _ = blocks(suffix)
    for index, block in enumerate(getattr(suffix_parent, name)):
        for part in block.modules():  # what a key-value cache calls the layers
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
    _check_exact(model, suffix, n_last)
    return suffix


@torch.no_grad()
def _check_exact(model: Any, suffix: Any, n_last: int) -> None:
    ids = torch.arange(12, device=next(model.parameters()).device).reshape(2, 6) % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with evaluation_mode(model, suffix):
        whole = model(input_ids=ids, attention_mask=mask).logits
        states = states_below(model, n_last, ids, mask)
        part = suffix(inputs_embeds=states, attention_mask=mask).logits
    real = mask.bool()
    gap = (whole - part)[real].abs().max() / whole[real].abs().max()
    if not gap <= PROBE_TOLERANCE:
        raise ValueError(
            f"the upper blocks of {type(model).__name__} need more than the hidden states below them (logits differ by "
            f"{gap:.1g} of the largest); train the whole model instead"
        )


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; afterwards every part has the mode it had, also after an error."""
    modes = {part: part.training for model in models for part in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class ReachedError(Exception):
    """Ends a forward pass that has gone far enough, and carries out what it has found."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


@torch.no_grad()
def states_below(model: Any, n_last: int, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states (B, T, d) that enter the last `n_last` blocks. Dropout is as the model's mode says; call it in eval()."""
    parent, name = blocks(model)
    layers = getattr(parent, name)

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise ReachedError(args[0] if args else kwargs["hidden_states"])

    handle = layers[len(layers) - n_last].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    except ReachedError as reached:
        value: Tensor = reached.value
        return value
    finally:
        handle.remove()
    raise ValueError(f"{type(model).__name__} did not run its block {len(layers) - n_last}")


class FrozenPrefixCache:
    """The hidden states of a set of rows below the last `n_last` blocks of a model.

    Parameters
    ----------
    model
        A decoder-only transformers model; it is run in eval mode.
    n_last
        Blocks above the prefix.
    rows
        Token ids, a list for each row; none may be empty.
    path
        A directory to keep the states in (memory-mapped, reused when model and rows are the same); None: in memory.
    dtype
        torch.float32 or torch.float16 of what is kept.
    batch_size
        Rows a forward pass, sorted by length.
    """

    def __init__(
        self,
        model: Any,
        n_last: int,
        rows: Sequence[Sequence[int]],
        path: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 16,
    ) -> None:
        if not rows or not all(len(row) for row in rows):
            raise ValueError("rows must be there and hold at least one token each")
        self.rows = [list(row) for row in rows]
        self.device = next(model.parameters()).device
        self.offsets = np.concatenate([[0], np.cumsum([len(row) for row in self.rows])])
        kind = np.float16 if dtype == torch.float16 else np.float32
        shape = (int(self.offsets[-1]), model.config.hidden_size)
        if path is None:
            self.states = np.empty(shape, dtype=kind)
            self._fill(model, n_last, batch_size)
            return
        path = Path(path)
        key = {"model": _fingerprint(model), "n_last": n_last, "rows": _digest(self.rows), "dtype": kind.__name__}
        if not (path / "key.json").exists() or json.loads((path / "key.json").read_text()) != key:
            with replacing(path) as temporary:
                temporary.mkdir(parents=True, exist_ok=True)
                self.states = np.lib.format.open_memmap(temporary / "states.npy", mode="w+", dtype=kind, shape=shape)
                self._fill(model, n_last, batch_size)
                self.states.flush()
                (temporary / "key.json").write_text(json.dumps(key))
        self.states = np.load(path / "states.npy", mmap_mode="r")

    def _fill(self, model: Any, n_last: int, batch_size: int) -> None:
        training = model.training
        model.eval()
        order = sorted(range(len(self.rows)), key=lambda index: len(self.rows[index]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            width = len(self.rows[chosen[-1]])
            ids = torch.zeros(len(chosen), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for place, index in enumerate(chosen):
                ids[place, : len(self.rows[index])] = torch.tensor(self.rows[index])
                mask[place, : len(self.rows[index])] = 1
            states = states_below(model, n_last, ids.to(self.device), mask.to(self.device)).float().cpu().numpy()
            for place, index in enumerate(chosen):
                self.states[self.offsets[index] : self.offsets[index + 1]] = states[place, : len(self.rows[index])]
        model.train(training)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """`inputs_embeds` (B, T, d) in fp32 and `attention_mask` (B, T) of some rows, padded on the right."""
        parts = [
            torch.from_numpy(np.array(self.states[self.offsets[i] : self.offsets[i + 1]])).float() for i in indices
        ]
        states = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(p), dtype=torch.long) for p in parts], batch_first=True)
        return {"inputs_embeds": states.to(self.device), "attention_mask": mask.to(self.device)}


def _digest(rows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([[int(token) for token in row] for row in rows]).encode()).hexdigest()


def _fingerprint(model: Any) -> str:
    """A hash of every parameter's name, shape and sum; tells models apart, not a proof of equality."""
    facts = [(name, list(p.shape), float(p.detach().double().sum())) for name, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
