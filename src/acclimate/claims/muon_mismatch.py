"""Claim of `muon`: fine-tuning with the other optimiser than the one of pretraining costs a little, and LoRA takes most of that away.

A byte-level GPT (width 128, 4 layers, 0.9 million parameters) is pretrained twice on general text (Wikipedia, worked problems, requests
to an assistant), with AdamW and with Muon (matrices; the rest by AdamW), and fine-tuned on reviews: {all weights, LoRA of rank 4} x
{AdamW, Muon}. A seed draws the order of fine-tuning and the adapter, with `--full` also start and order of pretraining. Every one of the
eight ways chooses its learning rate from the same number of values, a factor of about 3 apart, by the perplexity of development text,
with a seed that the results do not use; results are on other text.

    gap = perplexity(mismatched) - perplexity(matched), of the same pretrained weights and the same mode

One of the two optimisers may simply be the better one for a short run, which makes one gap negative and the other large. The mean of
both gaps is free of that: it is the mismatch, and what LoRA is asked to reduce.

And on real weights: MiniLM-L6 with LoRA of rank 8 learns the sentiment of sentences with AdamW, with torch.optim.Muon, and with ours.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acclimate import data
from acclimate.claims import frameft, zero_shot
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.optim.muon import Muon, build_muon
from acclimate.optim.update_strength import snapshot, summary, update_report

Optimizer = Literal["adamw", "muon"]
Mode = Literal["full", "lora"]

CONTEXT, WIDTH, LAYERS, HEADS = 128, 128, 4, 4
RANK, WARMUP, CLIP = 4, 0.03, 1.0
BETAS = (0.9, 0.95)
TUNING_SEED = 1000
LORA_SHARE = 0.6  # of the gap of full fine-tuning
PRETRAINING_LR = {"adamw": 3e-3, "muon": 2e-3}  # of matrices; the rest by AdamW at 3e-3
MODES: tuple[Mode, ...] = ("full", "lora")
PRETRAINED: tuple[tuple[Optimizer, Optimizer], ...] = (("adamw", "muon"), ("muon", "adamw"))  # by, and the other one
CELLS = tuple((by, mode, optimizer) for by, _ in PRETRAINED for mode in MODES for optimizer, _ in PRETRAINED)
# around the best one for a seed and on text that the results do not use
LRS: dict[tuple[Optimizer, Mode, Optimizer], tuple[float, ...]] = {
    ("adamw", "full", "adamw"): (3e-4, 1e-3, 3e-3),
    ("adamw", "full", "muon"): (1e-3, 3e-3, 1e-2),
    ("adamw", "lora", "adamw"): (3e-3, 1e-2, 3e-2),
    ("adamw", "lora", "muon"): (1e-2, 3e-2, 1e-1),
    ("muon", "full", "adamw"): (3e-4, 1e-3, 3e-3),
    ("muon", "full", "muon"): (3e-4, 1e-3, 3e-3),
    ("muon", "lora", "adamw"): (3e-3, 1e-2, 3e-2),
    ("muon", "lora", "muon"): (3e-3, 1e-2, 3e-2),
}


@dataclass(frozen=True)
class Size:
    pretraining: int  # steps
    steps: int  # of fine-tuning
    rows: int  # windows in a batch of it
    seeds: tuple[int, ...]
    test: int  # windows of text to score
    lrs: int  # learning rates tried
    sentences: tuple[int, int]  # MiniLM: to train on, to score
    sentence_seeds: tuple[int, ...]
    pretrain_each: bool = False  # for every seed, instead of once


SIZES: dict[str, Size] = {
    "fast": Size(1, 1, 2, (0,), 2, 1, (10, 8), (0,)),
    "default": Size(1200, 100, 8, (0, 1, 2), 256, 3, (1000, 1000), (0, 1, 2)),
    "full": Size(2000, 400, 16, (0, 1, 2, 3, 4), 1024, 3, (2000, 1000), tuple(range(5)), pretrain_each=True),
}


# --- the small language model ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            p(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class BytesGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1])
        return self.lm_head(self.norm(self.blocks(self.embedding(text) + self.position(positions))))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean over bytes of -log p of windows (rows, CONTEXT + 1)."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    return math.exp(statistics.fmean(float(loss_of(model, part)) for part in windows.split(64)))


@lru_cache
def text(kind: Literal["general", "encyclopaedia", "reviews", "held-out reviews"]) -> Tensor:
    """Bytes: what is pretrained on (encyclopaedia, worked problems, requests), other pages of the first, and what is fine-tuned on."""
    sources = {
        "general": (("wikitext2", "validation"), ("gsm8k", "train"), ("clinc150", "train")),
        "encyclopaedia": (("wikitext2", "test"),),
        "reviews": (("sentiment3", "train"),),
        "held-out reviews": (("sentiment3", "test"),),
    }[kind]
    parts: list[str] = []
    for name, split in sources:
        for row in data.read_table(name, split=split).rows:
            parts.append(f"{row['question']}\n{row['answer']}\n" if name == "gsm8k" else f"{row['text']}\n")
    return torch.frombuffer(bytearray("".join(parts).encode()), dtype=torch.uint8).long()


def windows(source: Tensor, count: int) -> Tensor:
    """`count` windows (count, CONTEXT + 1), evenly spread."""
    starts = torch.linspace(0, len(source) - CONTEXT - 1, count).long()
    return source[starts[:, None] + torch.arange(CONTEXT + 1)]


def batches(source: Tensor, steps: int, rows: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(source) - CONTEXT, (rows,), generator=generator)
        yield source[starts[:, None] + torch.arange(CONTEXT + 1)]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, source: Tensor, steps: int, rows: int, seed: int) -> None:
    """Warm-up, cosine, clipping: the recipe of the paper."""
    warmup = max(1, round(WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))
        ),
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in batches(source, steps, rows, seed):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        schedule.step()


def make_optimizer(model: nn.Module, name: Optimizer, lr: float, rest: float | None = None) -> torch.optim.Optimizer:
    """`rest`: the learning rate of what Muon leaves to AdamW (None: lr)."""
    if name == "muon":
        return build_muon(model, lr=lr, adamw_lr=rest, warn_mismatch=False)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, betas=BETAS, weight_decay=0.0)


def pretrained(by: Optimizer, steps: int, seed: int) -> BytesGPT:
    """Made once, and kept in the user's cache."""
    settings = {"by": by, "steps": steps, "seed": seed, "lr": PRETRAINING_LR, "text": "general"}

    def make(place: Path) -> None:
        torch.manual_seed(seed)
        model = BytesGPT()
        optimizer = make_optimizer(model, by, PRETRAINING_LR[by], PRETRAINING_LR["adamw"])
        fit(model, optimizer, text("general"), steps, 16, seed)
        save_file(model.state_dict(), place / "model.safetensors")

    model = BytesGPT()
    model.load_state_dict(load_file(zero_shot.cached("muon-mismatch", settings, make) / "model.safetensors"))
    return model


def adapted(model: BytesGPT, mode: Mode, seed: int) -> nn.Module:
    """A copy to train, with LoRA on every linear layer of the blocks for "lora"."""
    import peft

    model = copy.deepcopy(model)
    if mode == "full":
        return model
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up", "down"]
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))


@dataclass(frozen=True)
class Tuned:
    perplexity: float
    forgetting: float  # perplexity on the pretraining's text, after / before
    cosine_distance: float
    relative_change: float
    seconds: float


def fine_tune(by: Optimizer, mode: Mode, optimizer: Optimizer, lr: float, size: Size, seed: int, test: Tensor) -> Tuned:
    base = pretrained(by, size.pretraining, seed if size.pretrain_each else 0)
    model, start = adapted(base, mode, seed), time.perf_counter()
    before, old = snapshot(model), windows(text("encyclopaedia"), size.test // 2)
    fit(model, make_optimizer(model, optimizer, lr), text("reviews"), size.steps, size.rows, seed)
    seconds = time.perf_counter() - start
    moved = summary(update_report(model, before, spectra=False))
    layers = [means for group, means in moved.items() if group != "embedding and head"]
    return Tuned(
        perplexity(model, test),
        perplexity(model, old) / perplexity(base, old),
        statistics.fmean(means["cosine_distance"] for means in layers),
        statistics.fmean(means["relative_change"] for means in layers),
        seconds,
    )


@lru_cache
def held_out(kind: Literal["dev", "test"], count: int) -> Tensor:
    """Windows of the reviews that are not trained on; the two kinds are of different sentences."""
    whole = text("held-out reviews")
    return windows(whole[: len(whole) // 2] if kind == "dev" else whole[len(whole) // 2 :], count)


# --- real weights: sentences ---


def sentence_optimizer(name: str, model: frameft.Classifier, lr: float) -> list[torch.optim.Optimizer]:
    """Of the LoRA factors; the head is AdamW's everywhere."""
    factors, head = model.adapter_parameters(), list(model.head.parameters())
    rest = torch.optim.AdamW(head, lr=frameft.HEAD_LR, weight_decay=0.0)
    if name == "adamw":
        return [torch.optim.AdamW(factors, lr=lr, betas=BETAS, weight_decay=0.0), rest]
    if name == "torch.optim.Muon":
        return [torch.optim.Muon(factors, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), rest]
    return [Muon(factors, lr=lr), rest]


def sentence_run(
    name: str, lr: float, train: frameft.Encoded, test: frameft.Encoded, seed: int
) -> tuple[float, float, float]:
    """(accuracy, loss, seconds) after an epoch of MiniLM-L6 with LoRA of rank 8."""
    start, model = time.perf_counter(), frameft.Classifier(frameft.ARMS["lora"], seed).train()
    optimizers, plan = sentence_optimizer(name, model, lr), list(frameft.batches(train, 1, seed))
    warmup = max(1, round(WARMUP * len(plan)))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min((s + 1) / warmup, (len(plan) - s) / len(plan)))
        for o in optimizers
    ]
    for batch in plan:
        logits = model([train.ids[i] for i in batch])
        loss = nn.functional.cross_entropy(logits, train.labels[batch])
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return *frameft.score(model, test), time.perf_counter() - start


SENTENCE_SYSTEMS = ("ours", "adamw", "torch.optim.Muon")
SENTENCE_LRS = (5e-4, 1.5e-3, 5e-3)


def sentences(size: Size, report: Callable[[str], None]) -> list[Row]:
    train = frameft.encode(data.sample(data.read_table("sentiment3", split="train"), size.sentences[0], 0))
    test = frameft.encode(data.sample(data.read_table("sentiment3", split="test"), size.sentences[1], 0))
    cut = len(train.ids) * 4 // 5
    rows = []
    for name in SENTENCE_SYSTEMS:
        tried = {
            lr: sentence_run(name, lr, train.part(0, cut), train.part(cut, None), TUNING_SEED)[:2]
            for lr in SENTENCE_LRS[: size.lrs]
        }
        lr = max(tried, key=lambda lr: (tried[lr][0], -tried[lr][1]))
        runs = [sentence_run(name, lr, train, test, seed) for seed in size.sentence_seeds]
        extra = {"lr": lr, "held_out_accuracy": {f"{lr:g}": accuracy for lr, (accuracy, _) in tried.items()}}
        seconds = statistics.fmean(run[2] for run in runs)
        seeds = list(size.sentence_seeds)
        rows.append(
            Row.from_values(f"MiniLM, {name}", "accuracy", [r[0] for r in runs], seeds, seconds=seconds, extra=extra)
        )
        report(f"MiniLM, {name}: lr {lr:g} {extra['held_out_accuracy']}, accuracy {rows[-1].mean:.3f}")
    return rows


# --- the claim ---


class MuonMismatchClaim(Claim):
    name = "muon-mismatch"
    method = "muon"
    statement = (
        "Fine-tuning all weights with another optimiser than the one of pretraining ends at a higher perplexity than with the same "
        "one, whichever of AdamW and Muon came first; with LoRA the gap is at most 0.6 of that; and on MiniLM with LoRA our Muon is "
        "within half a point of the accuracy of AdamW and of torch.optim.Muon"
    )
    bars = (
        Bar("perplexity_gap", "full, pretrained with adamw", limit=0.0),
        Bar("perplexity_gap", "full, pretrained with muon", limit=0.0),
        Bar("perplexity_gap_of_lora_above_six_tenths_of_full", "mean of both", better="lower", limit=0.0),
        Bar("accuracy", "MiniLM, ours", than="MiniLM, adamw", limit=-0.005),
        Bar("accuracy", "MiniLM, ours", than="MiniLM, torch.optim.Muon", limit=-0.005),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        seeds = list(size.seeds)
        rows: list[Row] = []
        found: dict[tuple[Optimizer, Mode, Optimizer], list[float]] = {}
        for cell in CELLS:
            by, mode, optimizer = cell
            lr, tried = choose_lr(cell, size)
            runs = [fine_tune(*cell, lr, size, seed, held_out("test", size.test)) for seed in seeds]
            found[cell] = [run.perplexity for run in runs]
            name = f"{by}, then {optimizer} ({mode})"
            extra = {"lr": lr, "held_out_perplexity": tried}
            seconds = statistics.fmean(run.seconds for run in runs)
            for metric in ("perplexity", "forgetting", "cosine_distance", "relative_change"):
                values = [getattr(run, metric) for run in runs]
                rows.append(Row.from_values(name, metric, values, seeds, seconds=seconds, extra=extra))
            report(f"{name}: lr {lr:g} of {tried}, perplexity {statistics.fmean(found[cell]):.4f}")
        gaps: dict[tuple[Mode, Optimizer], list[float]] = {}
        for mode in MODES:
            for by, other in PRETRAINED:
                pairs = zip(found[by, mode, other], found[by, mode, by], strict=True)
                gaps[mode, by] = [mismatched - matched for mismatched, matched in pairs]
                rows.append(Row.from_values(f"{mode}, pretrained with {by}", "perplexity_gap", gaps[mode, by], seeds))
        means = {
            mode: [statistics.fmean(values) for values in zip(gaps[mode, "adamw"], gaps[mode, "muon"], strict=True)]
            for mode in MODES
        }
        rows += [Row.from_values(f"{mode}, mean of both", "perplexity_gap", means[mode], seeds) for mode in MODES]
        excess = [lora - LORA_SHARE * full for full, lora in zip(means["full"], means["lora"], strict=True)]
        rows.append(Row.from_values("mean of both", "perplexity_gap_of_lora_above_six_tenths_of_full", excess, seeds))
        return rows + sentences(size, report)


def choose_lr(cell: tuple[Optimizer, Mode, Optimizer], size: Size) -> tuple[float, dict[str, float]]:
    """The rate with the lowest perplexity on development text for the tuning seed, and that of each."""
    tried = {
        lr: fine_tune(*cell, lr, size, TUNING_SEED, held_out("dev", size.test)).perplexity
        for lr in LRS[cell][: size.lrs]
    }
    return min(tried, key=lambda lr: tried[lr]), {f"{lr:g}": round(value, 4) for lr, value in tried.items()}


CLAIM = MuonMismatchClaim()
