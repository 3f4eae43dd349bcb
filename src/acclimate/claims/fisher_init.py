"""Claim of Fisher-guided initialisation: lower training loss after equal steps than other starts, and no worse a model at the end.

Two text tasks on SmolLM2-135M-Instruct, LoRA r=8 on q and v of the last 10 blocks on cached prefixes, AdamW, batch 8, constant rate after
4 steps of warm-up: worked answers of GSM8K (one epoch, loss on the answer's tokens) and the sentiment of review sentences (three epochs,
cross-entropy over the two words). The arms that look at data look at all training rows, once; seeds then differ in the order of the rows (and
in the random start of the default arm). Every arm chooses its learning rate from the same three by the loss on held-out rows after a shorter
run. Each arm is PEFT's own code where PEFT has it. How long the starts take is measured by `benchmarks/fisher_init.py`, on an idle machine. One image task, a small ViT
trained on the digits 0 to 4 and adapted to 5 to 9, only checks that the method is not about text.

"early loss" is the mean training loss of the first 32 steps: its area under the curve.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acclimate import data, models
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.claims.gsm8k import problems
from acclimate.prefix import FrozenPrefixCache, suffix_model

ARMS = ("default", "pissa", "eva", "lora-ga", "fisher split", "fisher input", "fisher residual")
MAIN = "fisher split"
PEERS = ("default", "pissa", "eva", "lora-ga")
RATES = (5e-4, 1e-3, 2e-3)
RANK, ALPHA, BATCH, EARLY = 8, 16, 8, 32


@dataclass(frozen=True)
class Size:
    """How much of everything a budget takes. `seeds` for the arms that the bars compare; the others have the first."""

    blocks: int
    train: int
    held_out: int
    test: int
    longest: int  # tokens of a GSM8K problem with its answer
    search: int  # rows to train on for the choice of the rate
    seeds: tuple[int, ...]
    tasks: tuple[str, ...] = ("gsm8k", "sentiment", "digits")


SIZES = {
    "fast": Size(1, 16, 8, 16, 64, 8, (0,), ("sentiment", "digits")),
    "default": Size(10, 256, 32, 80, 112, 64, (0, 1, 2)),
    "full": Size(10, 256, 32, 200, 160, 256, (0, 1, 2, 3, 4)),
}


class FisherInitClaim(Claim):
    name = "fisher-init"
    method = "fisher-init"
    statement = (
        "LoRA started in Fisher directions (split) has a lower training loss over its first 32 steps than PEFT's default, PiSSA and LoRA-GA "
        "starts and not a higher one than EVA's, and ends within 0.5 % of the best of them in held-out NLL"
    )
    bars = (
        *(Bar(f"{task} early loss", MAIN, peer, "lower") for task in ("gsm8k", "sentiment") for peer in PEERS),
        *(Bar(f"{task} nll", MAIN, peer, "lower", "ratio", 1.005) for task in ("gsm8k", "sentiment") for peer in PEERS),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        rows: list[Row] = []
        for name in size.tasks:
            report(f"{name}: computing the frozen part")
            task = TASKS[name](size)
            for arm in ARMS:
                begin = Prepared(task, arm)
                lr = choose_rate(task, arm, begin, size, report)
                seeds = size.seeds if arm in (*PEERS, MAIN) else size.seeds[:1]
                runs = []
                for seed in seeds:
                    runs.append(run(task, begin(seed), lr, seed, task.train))
                    report(f"{name}, {arm}, seed {seed}: " + ", ".join(f"{k} {v:.4g}" for k, v in runs[-1].items()))
                seconds = float(np.mean([r["seconds"] for r in runs]))
                for metric in [key for key in runs[0] if key != "seconds"]:
                    values = [r[metric] for r in runs]
                    extra = {"learning_rate": lr, "preparation_seconds": begin.seconds}
                    rows.append(
                        Row.from_values(arm, f"{name} {metric}", values, list(seeds), seconds=seconds, extra=extra)
                    )
        order = {metric: place for place, metric in enumerate(dict.fromkeys(row.metric for row in rows))}
        return sorted(rows, key=lambda row: order[row.metric])


# --- tasks: what a start and a training run need of them ---


class TextTask:
    """Rows as token ids on the frozen prefix of SmolLM2; a subclass says which rows and which loss."""

    targets = ("q_proj", "v_proj")
    modules_to_save: tuple[str, ...] = ()
    rates = RATES
    epochs = 1

    def __init__(self, size: Size) -> None:
        model, self.tokenizer = models.load_model("smollm2")
        model.eval()
        self.rows = self.read(size)
        self.cache = FrozenPrefixCache(model, size.blocks, [row["ids"] for row in self.rows])
        self.suffix = suffix_model(model, size.blocks)
        numbers = list(range(len(self.rows)))
        seen = size.train + size.held_out
        self.train, self.held_out, self.test = numbers[: size.train], numbers[size.train : seen], numbers[seen:]

    def read(self, size: Size) -> list[dict[str, Any]]:
        raise NotImplementedError

    def fresh(self) -> Any:
        return copy.deepcopy(self.suffix)

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        return {**self.cache.batch(indices), "chosen": [self.rows[i] for i in indices]}

    def hidden(self, model: Any, batch: dict[str, Any]) -> Tensor:
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        inputs = {key: batch[key] for key in ("inputs_embeds", "attention_mask")}
        return core.model(**inputs).last_hidden_state

    def head(self, model: Any) -> Tensor:
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        return core.lm_head.weight


class Gsm8k(TextTask):
    def read(self, size: Size) -> list[dict[str, Any]]:
        wanted = {"train": size.train + size.held_out, "test": size.test}
        return [
            {"ids": ids, "start": start}
            for split, count in wanted.items()
            for ids, start in problems(self.tokenizer, count, size.longest, split)
        ]

    def loss(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int, int]:
        """(summed loss, tokens, tokens that were the most probable ones)."""
        hidden = self.hidden(model, batch)
        places = [(r, t) for r, row in enumerate(batch["chosen"]) for t in range(row["start"], len(row["ids"]))]
        index, time_step = torch.tensor(places).T
        labels = torch.tensor([batch["chosen"][r]["ids"][t] for r, t in places])
        logits = nn.functional.linear(hidden[index, time_step - 1], self.head(model))
        right = int((logits.argmax(-1) == labels).sum())
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), right


class Sentiment(TextTask):
    epochs = 3

    def read(self, size: Size) -> list[dict[str, Any]]:
        words = [self.tokenizer(f" {word}")["input_ids"][0] for word in ("negative", "positive")]
        self.words = torch.tensor(words)
        found = []
        for split, wanted in (("train", size.train + size.held_out), ("test", 5 * size.test)):
            for row in data.read_table("sentiment3", split=split).rows[:wanted]:
                ids = self.tokenizer(f"Review: {row['text']}\nSentiment:")["input_ids"]
                found.append({"ids": ids, "label": int(row["label"] == "positive")})
        return found

    def loss(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int, int]:
        last = batch["attention_mask"].sum(1) - 1
        hidden = self.hidden(model, batch)[torch.arange(len(last)), last]
        logits = nn.functional.linear(hidden, self.head(model)[self.words])
        labels = torch.tensor([row["label"] for row in batch["chosen"]])
        right = int((logits.argmax(-1) == labels).sum())
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), right


class Digits:
    """scikit-learn's 8 x 8 digits on a ViT of two patches a side squared: trained whole on 0 to 4, adapted to 5 to 9 with a new head."""

    targets = ("q_proj", "v_proj")
    modules_to_save: tuple[str, ...] = ("classifier",)
    rates = RATES[-1:]
    epochs = 1

    def __init__(self, size: Size) -> None:
        from sklearn.datasets import load_digits
        from transformers import ViTConfig, ViTForImageClassification

        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels)
        before = torch.nonzero(self.labels < 5)[:, 0].tolist()
        after = torch.nonzero(self.labels >= 5)[:, 0].tolist()
        self.train, self.held_out, self.test = after[: size.train], after[-50:], after[size.train : -50]
        torch.manual_seed(0)
        options: Any = {"num_labels": 5}
        config = ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_dropout_prob=0.0,
            **options,
        )
        self.model = ViTForImageClassification(config)
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for seed in range(1 if size.blocks == 1 else 10):
            for indices in batches(before, 32, seed):
                loss, count, _ = self.loss(self.model, self.batch(indices))
                (loss / count).backward()
                optimiser.step()
                optimiser.zero_grad()

    def fresh(self) -> Any:
        model = copy.deepcopy(self.model)
        torch.manual_seed(1)
        head: Any = model.classifier
        head.reset_parameters()
        return model

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        return {"pixel_values": self.images[list(indices)], "labels": self.labels[list(indices)] % 5}

    def loss(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int, int]:
        logits = model(pixel_values=batch["pixel_values"]).logits
        right = int((logits.argmax(-1) == batch["labels"]).sum())
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits), right


TASKS: dict[str, Any] = {"gsm8k": Gsm8k, "sentiment": Sentiment, "digits": Digits}


def batches(indices: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    order = np.random.default_rng(seed).permutation(list(indices)).tolist()
    return (order[i : i + size] for i in range(0, len(order), size))


# --- starts ---


def start(task: Any, arm: str, seed: int, rows: Sequence[int]) -> tuple[Any, float]:
    """(model with the arm's LoRA on it, seconds that finding the start took). Every arm sees the same batches."""
    from peft import EvaConfig, LoraConfig, LoraGAConfig, get_peft_model, initialize_lora_eva_weights
    from peft.tuners.lora import preprocess_loraga

    from acclimate.adapters.fisher import fisher_init

    model = task.fresh()
    looked_at = [task.batch(indices) for indices in batches(rows, BATCH, seed)]
    options: dict[str, Any] = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(task.targets),
        "modules_to_save": list(task.modules_to_save) or None,
    }
    torch.manual_seed(seed)
    begun = time.perf_counter()
    if arm == "default":
        return get_peft_model(model, LoraConfig(**options)), time.perf_counter() - begun
    if arm == "pissa":
        return get_peft_model(model, LoraConfig(**options, init_lora_weights="pissa")), time.perf_counter() - begun
    if arm == "eva":
        config = LoraConfig(**options, init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
        peft_model = get_peft_model(model, config)
        initialize_lora_eva_weights(
            peft_model,
            looked_at,
            forward_fn=lambda model, batch: task.loss(model, batch),
            prepare_model_inputs_fn=lambda batch, config: batch.get("attention_mask"),
            prepare_layer_inputs_fn=_real_positions,
            show_progress_bar=False,
        )
        return peft_model, time.perf_counter() - begun
    if arm == "lora-ga":
        options |= {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}
        config = LoraConfig(**options)

        def train_step() -> None:
            for batch in looked_at:
                loss, count, _ = task.loss(model, batch)
                (loss / count).backward()

        with redirect_stderr(StringIO()):
            preprocess_loraga(model, config, train_step)
        return get_peft_model(model, config), time.perf_counter() - begun
    peft_model = get_peft_model(model, LoraConfig(**options))
    mode: Any = arm.removeprefix("fisher ")
    fisher_init(
        peft_model,
        looked_at,
        loss_fn=lambda model, batch: task.loss(model, batch)[0],
        mode=mode,
        n_examples=len(rows),
        seed=seed,
    )
    return peft_model, time.perf_counter() - begun


class Prepared:
    """An arm's started models by seed: one start on all training rows, or, for the random one, a start for each seed."""

    def __init__(self, task: Any, arm: str) -> None:
        self.task, self.arm = task, arm
        self.model, self.seconds = start(task, arm, 0, task.train)

    def __call__(self, seed: int) -> Any:
        return start(self.task, self.arm, seed, [])[0] if self.arm == "default" else copy.deepcopy(self.model)


def _real_positions(layer_input: Any, mask: Tensor | None, layer_name: str) -> Tensor:
    x = layer_input[0] if isinstance(layer_input, tuple) else layer_input
    return x.flatten(0, 1) if mask is None else x[mask.bool()]


# --- training ---


def run(task: Any, model: Any, lr: float, seed: int, rows: Sequence[int], score: str = "test") -> dict[str, float]:
    """Train a started model and score it."""
    begun = time.perf_counter()
    model.train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 4))
    losses = []
    for epoch in range(task.epochs):
        for indices in batches(rows, BATCH, 100 * seed + epoch):
            loss, count, _ = task.loss(model, task.batch(indices))
            (loss / count).backward()
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()) / count)
    seconds = time.perf_counter() - begun
    nll, accuracy = evaluate(model, task, getattr(task, score))
    early = losses[:EARLY]
    return {
        "early loss": float(np.mean(early)),
        "loss of steps 1-16": float(np.mean(early[:16])),
        "loss of steps 17-32": float(np.mean(early[16:] or early[-1:])),
        "nll": nll,
        "accuracy": accuracy,
        "seconds": seconds,
    }


@torch.no_grad()
def evaluate(model: Any, task: Any, rows: Sequence[int]) -> tuple[float, float]:
    """(mean loss, accuracy) over rows, per token where the loss is."""
    model.eval()
    found = [task.loss(model, task.batch(rows[i : i + 16])) for i in range(0, len(rows), 16)]
    total, count, right = (sum(float(part[k]) for part in found) for k in range(3))
    return total / count, right / count


def choose_rate(task: Any, arm: str, begin: Prepared, size: Size, report: Callable[[str], None]) -> float:
    """The learning rate with the least loss on the held-out rows, after training on a part of the training rows."""
    if len(task.rates) == 1:
        return task.rates[0]
    rows = task.train[: size.search]
    losses = {lr: run(task, begin(99), lr, 99, rows, score="held_out")["nll"] for lr in task.rates}
    report(f"{arm}: held-out loss " + ", ".join(f"{lr:g}: {loss:.4g}" for lr, loss in losses.items()))
    return min(losses, key=lambda lr: (np.isnan(losses[lr]), losses[lr]))


CLAIM = FisherInitClaim()
