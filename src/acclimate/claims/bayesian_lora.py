"""Claim of `bayesian-lora`: fine-tuned on a few dozen sentences, its probabilities mean more than LoRA's, at the same accuracy.

SmolLM2-135M-Instruct learns sentiment from 64 sentences of film reviews in 30 epochs, until it knows them by heart; that is when LoRA
becomes too sure of itself. It is scored on other film reviews, and out of distribution on reviews of products and restaurants. The
adapters (rank 8, alpha 16) sit on the query and value projections of the last 10 blocks; hidden states below are computed once
(`acclimate.prefix`), and the head is cut down to the two answers, which changes nothing in a softmax among them.

All arms: AdamW at 1e-3, batches of 16 of like length, no early stop, the same sentences and batches for a seed. The probabilities of
all arms are softmaxes among " negative" and " positive", scored by the same functions. `max_lambda` is chosen by the NLL on 64
held-out sentences of the first seed, as are learning rate and epochs of "lora, tuned". `full` adds the mild regime, 256 x 8 epochs.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from peft import LoraConfig, MontecloraConfig, get_peft_model
from torch import Tensor, nn

from acclimate import data, metrics, models
from acclimate.adapters import BayesianLoraConfig
from acclimate.adapters.bayesian_lora import tuner_of
from acclimate.adapters.bayesian_lora.predict import choice_token_ids
from acclimate.adapters.bayesian_lora.training import kl_loss
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.prefix import FrozenPrefixCache, suffix_model

MODEL, DATA = "smollm2", "sentiment3"
PROMPT, ANSWERS = "Review: {text}\nSentiment:", (" negative", " positive")
LONGEST, BATCH, LR, SAMPLES = 72, 16, 1e-3, 8
TARGETS: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
METRICS = ("ece", "nll", "accuracy")
LAMBDAS = (0.03, 0.1, 0.3)
TUNED_LRS, TUNED_EPOCHS = (1e-4, 3e-4, 1e-3), (2, 5, 10)

Probs = NDArray[np.float64]
Set = Literal["validation", "test", "ood"]
Predict = Callable[[Set], Probs]  # (draws, N, 2)


@dataclass(frozen=True)
class Size:
    layers: int
    regimes: tuple[tuple[str, int, int], ...]  # suffix of the metrics' names, sentences, epochs
    held_out: int  # sentences to choose max_lambda, temperature, and the tuned LoRA by
    test: int
    ood: int  # of each of the two other sources
    seeds: tuple[int, ...]
    peer_seeds: int  # how many of them the other arms run
    timed: tuple[int, int]  # rounds of the measurement of step times, steps in a round


SIZES: dict[str, Size] = {
    "fast": Size(2, (("", 16, 2),), 16, 16, 6, (0,), 1, (2, 1)),
    "default": Size(10, (("", 64, 30),), 64, 300, 150, (0, 1, 2), 1, (8, 3)),
    "full": Size(10, (("", 64, 30), ("_mild", 256, 8)), 64, 600, 500, (0, 1, 2, 3, 4), 3, (10, 5)),
}


class BayesianLoraClaim(Claim):
    name = "bayesian-lora"
    method = "bayesian-lora"
    statement = (
        "Fine-tuned on 64 sentences until it knows them by heart, Bayesian-LoRA (8 draws) has at most 0.8 times LoRA's calibration "
        "error (ECE) and NLL on other sentences, and less of both on reviews of another kind, with no more than 1.5 points less "
        "accuracy and steps that take at most 1.3 times as long"
    )
    bars = (
        Bar("ece", "bayesian-lora", than="lora", better="lower", kind="ratio", limit=0.8),
        Bar("nll", "bayesian-lora", than="lora", better="lower", kind="ratio", limit=0.8),
        Bar("ece_ood", "bayesian-lora", than="lora", better="lower", kind="ratio", limit=1.0),
        Bar("nll_ood", "bayesian-lora", than="lora", better="lower", kind="ratio", limit=1.0),
        Bar("accuracy", "bayesian-lora", than="lora", limit=-0.015),
        Bar("ms_per_step", "bayesian-lora", than="lora", better="lower", kind="ratio", limit=1.3),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        report("hidden states below the adapted blocks")
        bench = Bench(size)
        rows: list[Row] = []
        for suffix, count, epochs in size.regimes:
            results = Results(suffix)
            _compare(bench, results, count, epochs, report)
            rows += results.rows()
        report("time of a step, the methods taking turns")
        for name, values in _step_times(bench).items():
            rows.append(Row.from_values(name, "ms_per_step", values, list(range(len(values)))))
        for line in _table(rows):
            report(line)
        return sorted(rows, key=lambda row: row.metric != "ece")  # it is the one plotted


class Bench:
    """Model, cached sentences, and which of them are for what."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.whole, self.tokenizer = models.load_model(MODEL)
        rows = [row for split in ("train", "test") for row in data.read_table(DATA, split=split).rows]
        ids = [self.tokenizer(PROMPT.format(**row))["input_ids"] for row in rows]
        kept = [index for index in range(len(rows)) if len(ids[index]) <= LONGEST]
        film = [index for index in kept if rows[index]["source"] == "imdb"]
        film = [film[i] for i in np.random.default_rng(0).permutation(len(film))]
        self.sets: dict[str, list[int]] = {"test": film[: size.test], "ood": []}
        pool = film[size.test :]
        for source in ("amazon", "yelp"):
            of_source = [index for index in kept if rows[index]["source"] == source]
            self.sets["ood"] += [of_source[i] for i in np.random.default_rng(1).permutation(len(of_source))[: size.ood]]
        most = max(count for _, count, _ in size.regimes)
        self.drawn = {
            seed: [pool[i] for i in np.random.default_rng(seed).permutation(len(pool))[: most + size.held_out]]
            for seed in size.seeds
        }
        used = sorted({index for part in (*self.sets.values(), *self.drawn.values()) for index in part})
        self.place = {index: place for place, index in enumerate(used)}
        self.cache = FrozenPrefixCache(self.whole, size.layers, [ids[index] for index in used])
        self.length = {index: len(ids[index]) for index in used}
        self.label = {index: int(rows[index]["label"] == "positive") for index in used}
        upper = suffix_model(self.whole, size.layers)
        head = nn.Linear(upper.config.hidden_size, len(ANSWERS), bias=False)
        words = choice_token_ids(self.tokenizer, ANSWERS)
        head.weight.data = self.whole.get_output_embeddings().weight.data[words].clone()
        upper.set_output_embeddings(head)
        upper.set_input_embeddings(nn.Embedding(1, upper.config.hidden_size))  # the states come in its place
        self.upper = upper.requires_grad_(False).eval()

    def suffix(self) -> nn.Module:
        """The upper blocks as a model of their own to put an adapter on; the frozen weights are shared between all of them."""
        return copy.deepcopy(self.upper, memo={id(parameter): parameter for parameter in self.upper.parameters()})

    def train_rows(self, seed: int, count: int) -> list[int]:
        return self.drawn[seed][:count]

    def rows(self, which: Set, seed: int) -> list[int]:
        return self.drawn[seed][-self.size.held_out :] if which == "validation" else self.sets[which]

    def batch(self, rows: list[int]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(inputs, position of the last token of each row, labels)."""
        inputs = self.cache.batch([self.place[row] for row in rows])
        return inputs, inputs["attention_mask"].sum(1) - 1, torch.tensor([self.label[row] for row in rows])

    def labels(self, which: Set, seed: int) -> NDArray[np.int64]:
        return np.array([self.label[row] for row in self.rows(which, seed)])


def _answers(model: nn.Module, inputs: dict[str, Tensor], last: Tensor) -> Tensor:
    """Logits of the two answers, (copies x N, 2)."""
    logits = model(**inputs).logits
    return logits[torch.arange(len(logits)), last.repeat(len(logits) // len(last))]


def _epochs(bench: Bench, rows: list[int], epochs: int, seed: int) -> Iterator[list[list[int]]]:
    """Batches of each epoch: of like length, which wastes little on padding, mixed anew every time."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        mixed = sorted(rows, key=lambda row: bench.length[row] + rng.uniform(0, 12))
        batches = [mixed[start : start + BATCH] for start in range(0, len(mixed), BATCH)]
        yield [batches[i] for i in rng.permutation(len(batches))]


def _train(
    bench: Bench,
    config: Any,
    rows: list[int],
    epochs: int,
    seed: int,
    lr: float = LR,
    init_seed: int | None = None,
    after_epoch: Callable[[int, nn.Module], None] = lambda epoch, model: None,
) -> nn.Module:
    torch.manual_seed(seed if init_seed is None else init_seed)
    model: Any = get_peft_model(bench.suffix(), copy.deepcopy(config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    steps, done = epochs * -(-len(rows) // BATCH), 0
    for epoch, batches in enumerate(_epochs(bench, rows, epochs, seed), 1):
        model.train()
        for batch in batches:
            _step(bench, model, optimizer, batch, done / steps)
            done += 1
        after_epoch(epoch, model.eval())
    return model.eval()


def _step(bench: Bench, model: Any, optimizer: torch.optim.Optimizer, batch: list[int], progress: float) -> None:
    inputs, last, labels = bench.batch(batch)
    loss = F.cross_entropy(_answers(model, inputs, last), labels)
    config = model.peft_config["default"]
    if isinstance(config, BayesianLoraConfig):
        loss = loss + kl_loss(model, progress)
    elif config.monteclora_config is not None:
        loss = loss + model.base_model._get_monteclora_loss()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def _probs(bench: Bench, model: nn.Module, which: Set, seed: int, passes: int = 1) -> Probs:
    """(passes, N, 2) in the order of the rows; the model may be one that answers a batch several times over."""
    rows = bench.rows(which, seed)
    order = sorted(range(len(rows)), key=lambda i: bench.length[rows[i]])
    found: list[Tensor] = []
    for start in range(0, len(order), 32):
        inputs, last, _ = bench.batch([rows[i] for i in order[start : start + 32]])
        found.append(torch.softmax(_answers(model, inputs, last).double(), -1).unflatten(0, (passes, -1)))
    result = np.empty((passes, len(rows), 2))
    result[:, order] = torch.cat(found, 1).numpy()
    return result


def _one_pass(bench: Bench, model: nn.Module, seed: int) -> Predict:
    return lambda which: _probs(bench, model, which, seed)


def _draws(bench: Bench, model: nn.Module, seed: int) -> Predict:
    def predict(which: Set) -> Probs:
        with tuner_of(model).posterior_samples(SAMPLES, torch.Generator().manual_seed(seed)):
            return _probs(bench, model, which, seed, SAMPLES)

    return predict


def _dropout_on(bench: Bench, model: nn.Module, seed: int) -> Predict:
    """Every pass has its own masks."""

    def predict(which: Set) -> Probs:
        torch.manual_seed(seed)
        model.train()
        found = np.concatenate([_probs(bench, model, which, seed) for _ in range(SAMPLES)])
        model.eval()
        return found

    return predict


def _together(bench: Bench, members: list[nn.Module], seed: int) -> Predict:
    return lambda which: np.concatenate([_probs(bench, member, which, seed) for member in members])


def _scaled(bench: Bench, model: nn.Module, seed: int) -> Predict:
    """One temperature, fitted on the held-out sentences."""

    def log_probs(which: Set) -> Probs:
        return np.log(np.maximum(_probs(bench, model, which, seed)[0], 1e-300))

    scaler = metrics.TemperatureScaler().fit(log_probs("validation"), bench.labels("validation", seed))
    return lambda which: scaler.transform(log_probs(which))[None]


@dataclass
class Results:
    """Metrics by system and seed; what is not compared goes into `extra`."""

    suffix: str
    values: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, system: str, seed: int, predict: Predict, bench: Bench, **costs: Any) -> None:
        found: dict[str, float] = {}
        own = self.costs.setdefault(system, {"extra": {"classes": list(ANSWERS), "definition": metrics.DEFINITION}})
        sets: tuple[tuple[Set, str], ...] = (("test", ""), ("ood", "_ood"))
        for which, ending in sets:
            samples, labels = predict(which), bench.labels(which, seed)
            probs = samples.mean(axis=0)
            for name in METRICS:
                found[name + ending + self.suffix] = getattr(metrics, name)(probs, labels)
            own["extra"].setdefault("brier" + ending, []).append(metrics.brier(probs, labels))
            epistemic = float(metrics.uncertainty_parts(samples)["epistemic"].mean())
            own["extra"].setdefault("epistemic" + ending, []).append(epistemic)
        self.values.setdefault(system, {})[seed] = found
        own.update(costs)

    def rows(self) -> list[Row]:
        return [
            Row.from_values(
                system, metric, [found[metric] for found in by_seed.values()], list(by_seed), **self.costs[system]
            )
            for system, by_seed in self.values.items()
            for metric in next(iter(by_seed.values()))
        ]


def _trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _compare(bench: Bench, results: Results, count: int, epochs: int, report: Callable[[str], None]) -> None:
    """Every arm on its seeds; an arm that cannot be run says why and is left out."""
    seeds = bench.size.seeds
    peers = seeds[: bench.size.peer_seeds]

    untouched = bench.suffix()
    results.add("untouched model", seeds[0], _one_pass(bench, untouched, seeds[0]), bench)
    loras: dict[int, nn.Module] = {}
    for seed in seeds:
        report(f"lora, seed {seed}: {count} sentences, {epochs} epochs")
        start = time.perf_counter()
        loras[seed] = lora = _train(bench, LoraConfig(**TARGETS), bench.train_rows(seed, count), epochs, seed)
        costs = {"seconds": time.perf_counter() - start, "parameters": _trained(lora)}
        results.add("lora", seed, _one_pass(bench, lora, seed), bench, **costs)
        results.add("lora + temperature", seed, _scaled(bench, lora, seed), bench, **costs)

    chosen, ready = _choose_lambda(bench, count, epochs, report)
    for seed in seeds:
        report(f"bayesian-lora, seed {seed}: max_lambda {chosen}")
        start = time.perf_counter()
        config = BayesianLoraConfig(**TARGETS, n_train=count, max_lambda=chosen)
        model = ready[1] if seed == seeds[0] else _train(bench, config, bench.train_rows(seed, count), epochs, seed)
        seconds = ready[0] if seed == seeds[0] else time.perf_counter() - start
        costs = {"seconds": seconds, "parameters": _trained(model)}
        results.add("bayesian-lora", seed, _draws(bench, model, seed), bench, **costs)
        results.add("bayesian-lora, mean", seed, _one_pass(bench, model, seed), bench, **costs)
    results.costs["bayesian-lora"]["extra"]["max_lambda"] = chosen

    for seed in peers:
        rows = bench.train_rows(seed, count)
        report(f"lora, tuned, seed {seed}")
        lr, best, tuned, seconds = _tuned(bench, rows, seed, epochs)
        results.add(
            "lora, tuned", seed, _one_pass(bench, tuned, seed), bench, seconds=seconds, parameters=_trained(loras[seed])
        )
        results.costs["lora, tuned"]["extra"].setdefault("chosen", []).append({"lr": lr, "epochs": best})

        report(f"lora, MC dropout, seed {seed}")
        start = time.perf_counter()
        dropout = _train(bench, LoraConfig(**TARGETS, lora_dropout=0.1), rows, epochs, seed)
        costs = {"seconds": time.perf_counter() - start, "parameters": _trained(dropout)}
        results.add("lora, MC dropout", seed, _dropout_on(bench, dropout, seed), bench, **costs)

        report(f"ensemble of 3 loras, seed {seed}")
        start = time.perf_counter()
        members = [loras[seed]]
        members += [_train(bench, LoraConfig(**TARGETS), rows, epochs, seed, init_seed=1000 * k + seed) for k in (1, 2)]
        costs = {"seconds": 1.5 * (time.perf_counter() - start), "parameters": 3 * _trained(loras[seed])}
        results.add("ensemble of 3 loras", seed, _together(bench, members, seed), bench, **costs)

        report(f"monteclora, seed {seed}")
        start = time.perf_counter()
        monte = LoraConfig(**TARGETS, monteclora_config=MontecloraConfig(buffer_size=20))
        model = _train(bench, monte, rows, epochs, seed)
        costs = {"seconds": time.perf_counter() - start, "parameters": _trained(model)}
        results.add("monteclora", seed, _one_pass(bench, model, seed), bench, **costs)

        try:
            start = time.perf_counter()
            predict = _laplace(bench, loras[seed], rows)
            found: dict[Set, Probs] = {
                "test": predict(bench.rows("test", seed)),
                "ood": predict(bench.rows("ood", seed)),
            }
        except Exception as reason:  # a peer with a long list of requirements of its own may fail in any way
            report(
                f"laplace-lora is left out: {type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
            )
        else:
            results.add("laplace-lora", seed, found.__getitem__, bench, seconds=time.perf_counter() - start)


def _choose_lambda(
    bench: Bench, count: int, epochs: int, report: Callable[[str], None]
) -> tuple[float, tuple[float, nn.Module]]:
    """(max_lambda with the lowest NLL on the first seed's held-out sentences, (seconds, model) of its training)."""
    seed = bench.size.seeds[0]
    tried: dict[float, tuple[float, float, nn.Module]] = {}
    for value in LAMBDAS:
        start = time.perf_counter()
        config = BayesianLoraConfig(**TARGETS, n_train=count, max_lambda=value)
        model = _train(bench, config, bench.train_rows(seed, count), epochs, seed)
        seconds = time.perf_counter() - start
        probs = _draws(bench, model, seed)("validation").mean(axis=0)
        tried[value] = metrics.nll(probs, bench.labels("validation", seed)), seconds, model
        report(f"bayesian-lora, max_lambda {value}: held-out NLL {tried[value][0]:.3f}")
    best = min(tried, key=lambda value: tried[value][0])
    return best, tried[best][1:]


def _tuned(bench: Bench, rows: list[int], seed: int, epochs: int) -> tuple[float, int, nn.Module, float]:
    """(lr, epochs, model, seconds of the search) of the LoRA with the lowest NLL on held-out sentences."""
    start = time.perf_counter()
    labels, best = bench.labels("validation", seed), (float("inf"), 0.0, 0)
    kept: nn.Module | None = None
    points = [epoch for epoch in TUNED_EPOCHS if epoch <= epochs] or [epochs]
    for lr in TUNED_LRS:

        def look(epoch: int, model: nn.Module, lr: float = lr) -> None:
            nonlocal best, kept
            if epoch in points:
                nll = metrics.nll(_probs(bench, model, "validation", seed)[0], labels)
                if nll < best[0]:
                    best, kept = (nll, lr, epoch), copy.deepcopy(model)

        _train(bench, LoraConfig(**TARGETS), rows, points[-1], seed, lr=lr, after_epoch=look)
    assert kept is not None
    return best[1], best[2], kept, time.perf_counter() - start


def _laplace(bench: Bench, model: nn.Module, rows: list[int]) -> Callable[[list[int]], Probs]:
    """Laplace-LoRA: a Kronecker-factored Laplace approximation over the adapters of the last two blocks, prior by evidence."""
    from laplace import Laplace  # needs torchvision; not among the requirements

    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)
            names = [name for name, _ in self.model.named_parameters() if "lora_" in name]
            last = {f".layers.{index}." for index in (bench.size.layers - 2, bench.size.layers - 1)}
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in names and any(part in name for part in last))

        def forward(self, batch: Any) -> Tensor:
            return _answers(self.model, {k: batch[k] for k in ("inputs_embeds", "attention_mask")}, batch["last"])

    def batches(chosen: list[int]) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(chosen), BATCH):
            inputs, last, labels = bench.batch(chosen[start : start + BATCH])
            # the package counts the rows of input_ids, which a model on stored states does not have
            yield {**inputs, "input_ids": last[:, None], "last": last, "labels": labels}

    class Loader:
        dataset = rows

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return batches(rows)

        def __len__(self) -> int:
            return -(-len(rows) // BATCH)

    approximation: Any = Laplace(Answers().eval(), "classification", subset_of_weights="all", hessian_structure="kron")
    approximation.fit(Loader())
    approximation.optimize_prior_precision(method="marglik")

    def predict(chosen: list[int]) -> Probs:
        found = [approximation(batch, link_approx="probit").detach().double().numpy() for batch in batches(chosen)]
        return np.concatenate(found)[None]

    return predict


def _step_times(bench: Bench) -> dict[str, list[float]]:
    """Milliseconds a training step, a value a round; the two take turns within a round, so that what else runs hits both."""
    rounds, steps = bench.size.timed
    seed = bench.size.seeds[0]
    rows = sorted(bench.train_rows(seed, 64), key=lambda row: bench.length[row])[-BATCH:]
    systems = {}
    for name, config in {
        "lora": LoraConfig(**TARGETS),
        "bayesian-lora": BayesianLoraConfig(**TARGETS, n_train=64),
    }.items():
        model: Any = get_peft_model(bench.suffix(), config).train()
        systems[name] = model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        _step(bench, *systems[name], rows, 1.0)
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, (model, optimizer) in systems.items():
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                _step(bench, model, optimizer, rows, 1.0)  # progress 1: with the KL, the dearest kind of step
                times.append(1000 * (time.perf_counter() - start))
            found[name].append(statistics.median(times))
    return found


def _table(rows: list[Row]) -> Iterator[str]:
    """All arms side by side, so that a reader sees where a cheaper one does as well."""
    names = ("ece", "nll", "accuracy", "ece_ood", "nll_ood", "accuracy_ood")
    for ending in dict.fromkeys("_mild" if row.metric.endswith("_mild") else "" for row in rows):
        yield f"{'arm' + (' (mild)' if ending else ''):24}" + "".join(f"{name:>14}" for name in names)
        by_key = {(row.system, row.metric): row.mean for row in rows}
        for system in dict.fromkeys(row.system for row in rows if row.metric == "ece" + ending):
            yield f"{system:24}" + "".join(f"{by_key[system, name + ending]:14.3f}" for name in names)


CLAIM = BayesianLoraClaim()
