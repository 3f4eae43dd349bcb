"""Claim of `io-adam`: AdamW's quality with much less memory for gradients and optimiser states.

Quality (a): a byte-level language model (2 layers, width 64, untied) learns WikiText-2 from nothing, 300 steps; loss on the test split.
Quality (b): MiniLM-L6, all 22.7 million weights, learns the sentiment of 2,000 review sentences, 100 steps of 16; accuracy on 1,000.
Every method picks its learning rate, from three in (a) and two in (b), on held-out training text with seeds of their own; all Adams have betas (0.9, 0.99) and
no weight decay, all rates rise for a tenth of the steps and fall to zero. `fused` is the same arithmetic as `io-adam` and takes its rate.
Memory: three steps of 1 x 64 tokens on SmolLM2-135M, each optimiser in a process of its own: bytes of weights, gradients and states, and
the peak of the resident memory. Time: step and backward pass on MiniLM, the optimisers taking turns.

The published experiments are LLaMA on C4, GPT-2 on WikiText-2 and RoBERTa on CoLA; the bars are the ones stated for these sizes.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acclimate import data, models, runs
from acclimate.claims import frameft
from acclimate.claims.base import Bar, Budget, Claim, Row, in_a_process_of_its_own
from acclimate.claims.frameft import Encoded
from acclimate.optim.io_adam import IOAdamW

BETAS = (0.9, 0.99)
LENGTH, BATCH = 48, 16
CONTEXT, WIDTH, HEADS = 96, 64, 4
TUNING_SEEDS = (1000, 1001)


# --- the optimisers ---


@dataclass(frozen=True)
class Peer:
    """How to make an optimiser for (model, lr), and the rates it may choose from in (a) and in (b)."""

    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    language_rates: tuple[float, ...]
    sentiment_rates: tuple[float, ...]


def _matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of linear layers but the head's, which low-rank projections are for, and all others."""
    heads = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("head")]
    matrices = {id(m.weight) for m in heads}
    parameters = list(model.parameters())
    return [p for p in parameters if id(p) in matrices], [p for p in parameters if id(p) not in matrices]


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0, foreach=True)


def _adafactor(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=lr, weight_decay=0.0)


def _galore(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    matrices, others = _matrices(model)
    low_rank = {"params": matrices, "rank": 16, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": others}, low_rank]
    optimizer: torch.optim.Optimizer = GaLoreAdamW(groups, lr=lr, betas=BETAS, no_deprecation_warning=True)
    return optimizer


def _apollo(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from apollo_torch import APOLLOAdamW

    matrices, others = _matrices(model)
    low_rank = {
        "params": matrices, "rank": 16, "proj": "random", "scale_type": "channel", "scale": 1.0, "update_proj_gap": 200, "proj_type": "std",
    }  # fmt: skip
    optimizer: torch.optim.Optimizer = APOLLOAdamW([{"params": others}, low_rank], lr=lr, betas=BETAS)
    return optimizer


def _adam_mini(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from adam_mini import Adam_mini

    whole: Any = model
    config = getattr(whole, "config", None) or whole.encoder.config
    kv = getattr(config, "num_key_value_heads", None)
    optimizer: torch.optim.Optimizer = Adam_mini(
        list(model.named_parameters()), lr=lr, betas=BETAS, weight_decay=0.0, dim=config.hidden_size,
        n_heads=config.num_attention_heads, n_kv_heads=kv, verbose=False,
    )  # fmt: skip
    optimizer.embd_names.add("embedding")  # type: ignore[attr-defined]
    optimizer.mlp_names |= {"intermediate", "output.dense"}  # type: ignore[attr-defined]
    optimizer.adam_block_names.add("norm")  # type: ignore[attr-defined]  # else "embeddings.LayerNorm" is taken for a matrix
    return optimizer


def _io(**options: Any) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, lr: IOAdamW(model, lr=lr, betas=BETAS, weight_decay=0.0, **options)


_ADAM, _MINILM = (3e-3, 6e-3, 1.2e-2), (5e-5, 2e-4)
PEERS = {
    "adamw": Peer(_adamw, _ADAM, _MINILM),
    "io-adam": Peer(_io(), _ADAM, _MINILM),
    "io-adam, fused": Peer(_io(fused=True), (), ()),
    "io-adam, p=1.8": Peer(_io(p=1.8), _ADAM, ()),
    "io-adam, paper, b=16": Peer(_io(scale="paper", buffer=16), (5e-3, 1e-2, 2e-2), ()),
    "adafactor": Peer(_adafactor, (3e-2, 1e-1, 3e-1), (5e-4, 2e-3)),
    "galore": Peer(_galore, (1e-2, 2e-2, 4e-2), (2e-4, 8e-4)),
    "adam-mini": Peer(_adam_mini, _ADAM, _MINILM),
    "apollo": Peer(_apollo, _ADAM, (2e-4, 8e-4)),
}
COMPARED = ("adamw", "io-adam", "io-adam, fused")  # in the bars
SENTIMENT = ("adamw", "io-adam", "adafactor", "galore", "adam-mini", "apollo")
MEMORY = ("io-adam, fused", *SENTIMENT)


@dataclass(frozen=True)
class Size:
    rates: int  # how many each may choose from
    language_steps: int
    language_seeds: tuple[int, ...]
    test_windows: int
    sentiment_steps: int
    sentiment_tuning_steps: int
    sentiment_seeds: tuple[int, ...]
    peer_seeds: tuple[int, int]  # how many of the seeds the systems outside the bars run, in (a) and in (b)
    sentences: tuple[int, int]
    peers: tuple[str, ...]
    sentiment_peers: tuple[str, ...]
    memory: tuple[str, ...]
    memory_model: str
    timed: tuple[int, int, int]  # blocks, steps in a block, tokens of a sentence


SIZES: dict[str, Size] = {
    "fast": Size(1, 3, (0,), 16, 2, 1, (0,), (1, 1), (32, 16), COMPARED, COMPARED[:2], COMPARED, "bytes", (2, 1, 4)),
    "default": Size(3, 300, (0, 1, 2, 3, 4, 5), 512, 100, 30, (0, 1, 2, 3), (2, 1), (2000, 1000), tuple(PEERS), SENTIMENT, MEMORY, "smollm2", (5, 3, LENGTH)),
    "full": Size(3, 2000, tuple(range(10)), 4096, 375, 120, tuple(range(10)), (10, 10), (2000, 1000), tuple(PEERS), SENTIMENT, MEMORY, "smollm2", (10, 10, LENGTH)),
}  # fmt: skip


class IOAdamClaim(Claim):
    name = "io-adam"
    method = "io-adam"
    statement = (
        "IO-Adam reaches AdamW's loss within 0.5 % and its accuracy within 1 point at a step time within 10 %; weights, gradients and "
        "states together are at least 18 % smaller, fused at least 25 %; gradients and states alone, fused, at least 30 %, and the "
        "peak of the process's memory at least 15 %"
    )
    bars = (
        Bar("loss", "io-adam", than="adamw", better="lower", kind="ratio", limit=1.005),
        Bar("loss", "io-adam, fused", than="adamw", better="lower", kind="ratio", limit=1.005),
        Bar("accuracy", "io-adam", than="adamw", limit=-0.01),
        Bar("training_bytes", "io-adam", than="adamw", better="lower", kind="ratio", limit=0.82),
        Bar("training_bytes", "io-adam, fused", than="adamw", better="lower", kind="ratio", limit=0.75),
        Bar("gradient_and_state_bytes", "io-adam, fused", than="adamw", better="lower", kind="ratio", limit=0.7),
        Bar("peak_bytes", "io-adam, fused", than="adamw", better="lower", kind="ratio", limit=0.85),
        Bar("ms_per_step", "io-adam", than="adamw", better="lower", kind="ratio", limit=1.1),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        rows = [*language(size, report), *sentiment(size, report), *memory(size, report)]
        report("time of a step, the optimisers taking turns")
        for name, values in step_times(size).items():
            rows.append(Row.from_values(name, "ms_per_step", values, list(range(len(values)))))
        return rows


def best(scores: dict[float, float]) -> float:
    """The rate with the smallest score; NaN is no score."""
    return min(scores, key=lambda lr: scores[lr] if math.isfinite(scores[lr]) else math.inf)


def try_rates(
    name: str, rates: Sequence[float], known: dict[str, float], score: Callable[[float], float]
) -> tuple[float, dict[str, float]]:
    """(the rate to use, what was tried)."""
    if not rates:
        return known["io-adam"], {}
    scores = {lr: score(lr) for lr in rates}
    known[name] = best(scores)
    return known[name], {f"{lr:g}": value for lr, value in scores.items()}


def schedule_for(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Rising for a tenth of the steps, then falling to zero, in straight lines."""
    warmup = max(1, steps // 10)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / steps))


# --- (a) a language model of bytes ---


@dataclass(frozen=True)
class _Config:
    hidden_size: int = WIDTH
    num_attention_heads: int = HEADS


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ByteModel(nn.Module):
    """A transformer of two layers over bytes; weights have a standard deviation of 0.02, outputs of blocks start small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = _Config()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.01 if name.endswith(("o_proj.weight", "mlp.2.weight")) else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: Tensor = self.lm_head(self.norm(self.blocks(hidden)))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@lru_cache
def text(split: str) -> Tensor:
    rows = data.read_table("wikitext2", split=split).rows
    return torch.frombuffer(bytearray("".join(row["text"] for row in rows).encode()), dtype=torch.uint8).long()


def windows(part: Tensor, count: int, seed: int) -> Tensor:
    """(count, CONTEXT + 1) from random places."""
    starts = torch.randint(len(part) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
    return part[starts[:, None] + torch.arange(CONTEXT + 1)]


def train_language(peer: Peer, lr: float, part: Tensor, test: Tensor, size: Size, seed: int) -> float:
    """Loss (nats per byte) on `test` after training on `part`."""
    steps = size.language_steps
    model = ByteModel(seed)
    optimizer = peer.make(model, lr)
    schedule = schedule_for(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(windows(part, BATCH, seed * 1_000_003 + step)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(model.loss(windows(test, size.test_windows, 7)))


def language(size: Size, report: Callable[[str], None]) -> list[Row]:
    everything, test = text("validation"), text("test")
    cut = len(everything) * 9 // 10
    fit, held = everything[:cut], everything[cut:]
    rows, known = [], {}  # type: ignore[var-annotated]
    for name in size.peers:
        peer = PEERS[name]
        seeds = list(size.language_seeds[: None if name in COMPARED else size.peer_seeds[0]])
        lr, tried = try_rates(
            name, peer.language_rates[: size.rates], known,
            lambda lr, peer=peer: statistics.fmean(  # type: ignore[misc]
                train_language(peer, lr, fit, held, size, seed) for seed in TUNING_SEEDS[: size.rates]
            ),
        )  # fmt: skip
        start = time.perf_counter()
        losses = [train_language(peer, lr, everything, test, size, seed) for seed in seeds]
        seconds = (time.perf_counter() - start) / len(seeds)
        report(f"language, {name}: loss {statistics.fmean(losses):.4f} at {lr:g}, held-out {tried}")
        extra = {"lr": lr, "held_out_loss": tried}
        rows.append(Row.from_values(name, "loss", losses, seeds, seconds=seconds, extra=extra))
    return rows


# --- (b) the sentiment of sentences ---


class Classifier(frameft.Classifier):
    """frameft's, with all weights to train."""

    def __init__(self, seed: int) -> None:
        super().__init__(frameft.ARMS["frozen encoder"], seed)
        self.encoder.requires_grad_(True)
        self.encoder.pooler = None  # it takes no part, and would have no gradient

    def loss(self, examples: Encoded, batch: list[int]) -> Tensor:
        return F.cross_entropy(self([examples.ids[i] for i in batch]), examples.labels[batch])


def encoded(split: str, count: int, seed: int = 0) -> Encoded:
    return frameft.encode(data.sample(data.read_table("sentiment3", split=split), count, seed), LENGTH)


def batches(count: int, seed: int) -> Iterator[list[int]]:
    """Random batches, epoch by epoch, for ever."""
    draw = random.Random(seed)
    while True:
        order = draw.sample(range(count), count)
        yield from (order[start : start + BATCH] for start in range(0, max(1, count - BATCH + 1), BATCH))


def train_sentiment(
    peer: Peer, lr: float, examples: Encoded, test: Encoded, steps: int, seed: int
) -> tuple[float, float]:
    """(accuracy, negative log-likelihood) on `test`."""
    model = Classifier(seed).train()
    optimizer = peer.make(model, lr)
    schedule, draws = schedule_for(optimizer, steps), batches(len(examples.ids), seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(examples, next(draws)).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    order = sorted(range(len(test.ids)), key=lambda i: len(test.ids[i]))
    with torch.no_grad():
        logits = torch.cat([model([test.ids[i] for i in order[start : start + 64]]) for start in range(0, len(order), 64)])  # fmt: skip
    labels = test.labels[order]
    return (logits.argmax(1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


def sentiment(size: Size, report: Callable[[str], None]) -> list[Row]:
    examples, test = encoded("train", size.sentences[0]), encoded("test", size.sentences[1])
    cut = len(examples.ids) * 4 // 5
    fit, held = examples.part(0, cut), examples.part(cut, None)
    rows, known = [], {}  # type: ignore[var-annotated]
    for name in size.sentiment_peers:
        peer = PEERS[name]
        seeds = list(size.sentiment_seeds[: None if name in ("adamw", "io-adam") else size.peer_seeds[1]])
        lr, tried = try_rates(
            name, peer.sentiment_rates[: size.rates], known,
            lambda lr, peer=peer: train_sentiment(peer, lr, fit, held, size.sentiment_tuning_steps, TUNING_SEEDS[0])[1],  # type: ignore[misc]
        )  # fmt: skip
        start = time.perf_counter()
        found = [train_sentiment(peer, lr, examples, test, size.sentiment_steps, seed) for seed in seeds]
        seconds = (time.perf_counter() - start) / len(seeds)
        accuracy, nll = [run[0] for run in found], [run[1] for run in found]
        report(f"sentiment, {name}: accuracy {statistics.fmean(accuracy):.4f} at {lr:g}, held-out nll {tried}")
        extra = {"lr": lr, "held_out_nll": tried}
        rows.append(Row.from_values(name, "accuracy", accuracy, seeds, seconds=seconds, extra=extra))
        rows.append(Row.from_values(name, "nll", nll, seeds, seconds=seconds, extra=extra))
    return rows


# --- memory and time ---


def memory(size: Size, report: Callable[[str], None]) -> list[Row]:
    rows = []
    for name in size.memory:
        found = (
            in_a_process_of_its_own(memory_of_three_steps, name, True)
            if size.memory_model == "smollm2"
            else memory_of_three_steps(name, False)
        )
        report(f"memory, {name}: " + ", ".join(f"{key} {value / 1e6:,.1f} MB" for key, value in found.items()))
        weights, grads, states, peak = found["weights"], found["grads"], found["states"], found["peak"]
        for metric, value in (("training_bytes", weights + grads + states), ("gradient_and_state_bytes", grads + states), ("state_bytes", states), ("peak_bytes", peak)):  # fmt: skip
            rows.append(Row.from_values(name, metric, [float(value)], [0], peak_memory_bytes=peak))
    return rows


def memory_of_three_steps(name: str, large: bool) -> dict[str, int]:
    """Bytes of weights, gradients (after the last backward pass) and states, and the peak of resident memory from loading on.

    large: SmolLM2-135M; else the byte model, whose peak says little.
    """
    runs.reset_peak_memory()
    model: Any = models.load_model("smollm2")[0] if large else ByteModel(0)
    vocabulary = model.config.vocab_size if large else 256
    optimizer = PEERS[name].make(model.train(), 1e-5)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        ids = torch.randint(vocabulary, (1, 64), generator=draw)
        logits = model(input_ids=ids).logits if large else model(ids)
        F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
    return {
        "weights": sum(p.nbytes for p in model.parameters()),
        "grads": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "states": sum(tensor_bytes(state) for state in optimizer.state.values()),
        "peak": runs.peak_memory(),
    }


def tensor_bytes(state: Any) -> int:
    """Tensors in an optimiser's state, also inside the projectors of GaLore and APOLLO."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(tensor_bytes, state.values()))
    return tensor_bytes(vars(state)) if hasattr(state, "ortho_matrix") else 0


def step_times(size: Size) -> dict[str, list[float]]:
    """Milliseconds of forward, backward and step on MiniLM (16 x 48 tokens), the median over the steps of each block."""
    blocks, steps, length = size.timed
    names = ("adamw", "io-adam", "io-adam, fused")
    built = {name: Classifier(0).train() for name in names}
    optimizers = {name: PEERS[name].make(model, 1e-5) for name, model in built.items()}
    draw = random.Random(0)
    vocabulary = frameft.pretrained()[0].config.vocab_size
    found: dict[str, list[float]] = {name: [] for name in names}

    def one_round() -> dict[str, float]:
        ids = [[draw.randrange(1000, vocabulary) for _ in range(length)] for _ in range(BATCH)]
        examples, times = Encoded(ids, torch.arange(BATCH) % 2), {}
        for name in draw.sample(names, len(names)):
            start = time.perf_counter()
            optimizers[name].zero_grad()
            built[name].loss(examples, list(range(BATCH))).backward()
            optimizers[name].step()
            times[name] = 1000 * (time.perf_counter() - start)
        return times

    one_round()
    for _ in range(blocks):
        block = [one_round() for _ in range(steps)]
        for name in names:
            found[name].append(statistics.median(times[name] for times in block))
    return found


CLAIM = IOAdamClaim()
