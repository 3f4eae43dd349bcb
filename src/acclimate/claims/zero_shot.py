"""A sentence encoder that classifies without a trained head: what the claims about merging and souping measure with.

The head is text, as CLIP's is: logits = 20 cos(embedding of the sentence, embedding of the class's name), embeddings being the mean of
the last hidden states over real tokens. The names are embedded once, by the untouched model, and stay. So that model is a zero-shot
classifier for any set of names, and fine-tuning the encoder on some classes can help or harm it on others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acclimate import data, models
from acclimate.runs import replacing

MODEL, LENGTH, SHARPNESS, BATCH = "minilm", 64, 20.0, 32


@dataclass(frozen=True)
class Sentences:
    """Token ids, the class of each sentence, and the classes' embeddings (classes, width)."""

    ids: list[list[int]]
    labels: Tensor
    heads: Tensor

    def part(self, chosen: Sequence[int]) -> Sentences:
        return Sentences([self.ids[i] for i in chosen], self.labels[list(chosen)], self.heads)


@lru_cache
def pretrained() -> tuple[Any, Any]:
    """The encoder and its tokenizer; the encoder is copied before it is changed."""
    model, tokenizer = models.load_model(MODEL, auto_class="AutoModel")
    return model.eval(), tokenizer


def fresh() -> Any:
    """A copy of the untouched encoder."""
    return copy.deepcopy(pretrained()[0])


def tokens(texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = pretrained()[1](list(texts), truncation=True, max_length=LENGTH)["input_ids"]
    return ids


def embed(model: Any, ids: Sequence[Sequence[int]]) -> Tensor:
    """Embeddings (rows, width) of norm 1 of one batch."""
    inputs = pretrained()[1].pad([{"input_ids": list(row)} for row in ids], return_tensors="pt")
    hidden = model(**inputs).last_hidden_state
    return nn.functional.normalize((hidden * inputs["attention_mask"][..., None]).sum(1), dim=1)


@torch.no_grad()
def embed_all(model: Any, ids: Sequence[Sequence[int]]) -> Tensor:
    """Embeddings (rows, width), in batches of like length."""
    model.eval()
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    parts = [order[start : start + 2 * BATCH] for start in range(0, len(order), 2 * BATCH)]
    found = torch.cat([embed(model, [ids[i] for i in part]) for part in parts])
    return found[torch.tensor(order).argsort()]


@lru_cache
def heads(names: tuple[str, ...]) -> Tensor:
    """The untouched model's embeddings of names like `card_arrival`."""
    return embed_all(pretrained()[0], tokens([name.replace("_", " ").lower() for name in names]))


def sentences(rows: Sequence[Mapping[str, Any]], names: Sequence[str], each: int | None = None) -> Sentences:
    """Rows with `text` and `intent`; the first `each` of every intent among `names`, which are the classes."""
    place, count, chosen = {name: i for i, name in enumerate(names)}, dict.fromkeys(names, 0), []
    for row in rows:
        if row["intent"] in place and (each is None or count[row["intent"]] < each):
            count[row["intent"]] += 1
            chosen.append(row)
    labels = torch.tensor([place[row["intent"]] for row in chosen])
    return Sentences(tokens([row["text"] for row in chosen]), labels, heads(tuple(names)))


def accuracy(model: Any, examples: Sentences) -> float:
    """Share of the sentences whose own class is the nearest."""
    return float(((embed_all(model, examples.ids) @ examples.heads.T).argmax(1) == examples.labels).double().mean())


def intents(domains: Sequence[str]) -> list[str]:
    """Names of the intents of some of CLINC150's domains, in the order of the domains."""
    by_domain: dict[str, dict[str, None]] = {}
    for row in data.read_table("clinc150", split="test").rows:
        by_domain.setdefault(row["domain"], {})[row["intent"]] = None
    return [name for domain in domains for name in sorted(by_domain[domain])]


def fine_tune(model: nn.Module, examples: Sentences, steps: int, lr: float, seed: int) -> None:
    """Cross-entropy on batches drawn epoch by epoch; AdamW, the rate falling to zero in a straight line."""
    torch.manual_seed(seed)  # of dropout
    draw = random.Random(seed)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    waiting: list[int] = []
    for _ in range(steps):
        if len(waiting) < BATCH:
            waiting = draw.sample(range(len(examples.ids)), len(examples.ids))
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        logits = SHARPNESS * embed(model, [examples.ids[i] for i in batch]) @ examples.heads.T
        loss = nn.functional.cross_entropy(logits, examples.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def cached(name: str, settings: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """A directory in the user's cache that `make` fills, once for the same settings and the same torch."""
    text = json.dumps({**settings, "torch": torch.__version__}, sort_keys=True)
    place = models.cache_dir() / "bench" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not place.exists():
        with replacing(place) as temporary:
            temporary.mkdir()
            make(temporary)
    return place
