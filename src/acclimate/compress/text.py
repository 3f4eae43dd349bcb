"""Text as batches of tokens, to calibrate and to measure perplexity on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.compress.offload import compute_device
from acclimate.compress.streams import Batch
from acclimate.errors import InputError

TOKENS = 2048  # in one forward pass over calibration text


def windows(tokenizer: Any, text: str, count: int, length: int, seed: int | None = None) -> Tensor:
    """`count` windows of `length` tokens (count, length): at random places (drawn with `seed`), or one after the other from the start.

    Raises InputError where the text is shorter than one window. Without a seed there may be fewer than `count`.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) < length:
        raise InputError(
            f"the text has {len(ids):,} tokens, which is less than one window of {length}. Take more, or --seqlen"
        )
    if seed is None:
        whole = min(count, len(ids) // length)
        return ids[: whole * length].reshape(whole, length)
    starts = torch.randint(0, len(ids) - length + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def calibration_batches(calibration: Any, model: Any) -> list[Batch]:
    """Batches of model inputs from what `compress_low_rank` takes as calibration. Raises ValueError where there is nothing."""
    device = compute_device(model)
    if isinstance(calibration, Tensor):
        if calibration.ndim != 2 or calibration.is_floating_point() or not calibration.numel():
            raise ValueError(f"calibration ids must be integers (sequences, tokens), not {tuple(calibration.shape)}")
        size = max(1, TOKENS // calibration.shape[1])
        return [{"input_ids": part.to(device)} for part in calibration.split(size)]
    if isinstance(calibration, tuple) and len(calibration) == 2 and callable(calibration[0]):
        tokenizer, texts = calibration
        context = getattr(model.config, "max_position_embeddings", None) or TOKENS
        rows = [ids for text in texts if (ids := tokenizer(text)["input_ids"][:context])]
        if not rows:
            raise ValueError("the calibration text is empty")
        rows.sort(key=len, reverse=True)
        batches: list[Batch] = []
        while rows:
            part = rows[: max(1, TOKENS // len(rows[0]))]
            rows = rows[len(part) :]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in part], batch_first=True)
            mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.long) for row in part], batch_first=True)
            batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
        return batches
    given = list(calibration) if isinstance(calibration, Iterable) else []
    if not given or not all(isinstance(batch, Mapping) for batch in given):
        raise ValueError(
            "calibration is a tensor of token ids, (tokenizer, list of texts), or batches of model inputs as dictionaries; "
            f"got {type(calibration).__name__}{' with nothing in it' if not given else ''}"
        )
    return [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in given]


def hold_out(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """(the last tenth of the sequences, the others), at least one each."""
    total = sum(len(batch["input_ids"]) for batch in batches)
    if total < 2:
        raise ValueError("beta='auto' holds out a tenth of the calibration sequences and needs two or more")
    wanted, rest = max(1, total // 10), list(batches)
    held: list[Batch] = []
    while wanted:
        last = rest.pop()
        size = len(last["input_ids"])
        part = min(wanted, size)
        held.append({key: value[size - part :] for key, value in last.items()})
        if part < size:
            rest.append({key: value[: size - part] for key, value in last.items()})
        wanted -= part
    return held, rest


@torch.no_grad()
def token_loss(
    model: Any, batches: Sequence[Mapping[str, Any]], advance: Callable[[int], None] = lambda n: None
) -> float:
    """Mean over the tokens, each row's first left out, of -ln p(token | those before it in its row)."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        keep = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask[:, 1:].flatten().bool()
        total += float(losses[keep].sum(dtype=torch.float64))
        count += int(keep.sum())
        advance(len(ids))
    return total / count


def perplexity(model: Any, ids: Tensor, batch_size: int = 2, advance: Callable[[int], None] = lambda n: None) -> float:
    """exp of `token_loss` over windows (N, T)."""
    device = compute_device(model)
    return math.exp(token_loss(model, [{"input_ids": part.to(device)} for part in ids.split(batch_size)], advance))
