"""Claim of `monosoup`: one fine-tune, edited without data, gets back half of what a soup of six gets back, and loses nothing that counts.

MiniLM-L6 with text heads (acclimate.claims.zero_shot) is fine-tuned, all weights, on five domains of CLINC150 (75 intents): 100 steps of 32
sentences, two learning rates and three seeds, so six checkpoints. In distribution (ID) is the test part of these intents. Out of
distribution (OOD) are, each with equal weight, the 75 intents of the other five domains and the 77 of Banking77, none of which was
trained on, and the ID sentences with a tenth of their letters garbled (case plays no part, the tokenizer lower-cases).

Next to each of the six: WiSE-FT at three shares, LiNeS, and its strong directions alone. Of several at once: Model Stock (the three
seeds of the higher rate, by twos), the uniform soup, and the greedy one (by ID validation). The best share of WiSE-FT would be chosen on the
test rows, so it is a bound to look at and no bar.

The published experiments are CLIP on ImageNet and its shifts, and language models of billions of weights.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate import data
from acclimate.claims import zero_shot
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.claims.zero_shot import Sentences
from acclimate.merge import baselines
from acclimate.merge.monosoup import monosoup

ID = ("banking", "kitchen_and_dining", "auto_and_commute", "utility", "small_talk")
OOD = ("credit_cards", "home", "meta", "travel", "work")
NOISE = 0.1  # share of the letters
ALPHAS = (0.3, 0.5, 0.7)

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Size:
    steps: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    each: int | None  # sentences of an intent: of the ID and unseen intents
    others: int  # .. of Banking77, of the garbled sentences, and of the validation of the greedy soup
    intents: int | None  # of each domain, and three times as many of Banking77


SIZES: dict[str, Size] = {
    "fast": Size(2, (5e-4,), (0, 1), 1, 1, 2),
    "default": Size(100, (3e-4, 5e-4), (0, 1, 2), None, 15, None),
    "full": Size(100, (1e-4, 3e-4, 5e-4), (0, 1, 2, 3, 4, 5), None, 40, None),
}


class MonoSoupClaim(Claim):
    name = "monosoup"
    method = "monosoup"
    statement = (
        "MonoSoup's edit of one fine-tuned checkpoint raises its accuracy out of distribution, costs at most 1 point in distribution, "
        "and gains at least half of what the uniform soup of six checkpoints gains"
    )
    bars = (
        Bar("ood_accuracy", "monosoup", than="fine-tuned"),
        Bar("id_accuracy", "monosoup", than="fine-tuned", limit=-0.01),
        Bar("ood_gain_beyond_half_of_soup", "monosoup", limit=0.0),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        tests = test_sets(size)
        base = {name: value.clone() for name, value in zero_shot.pretrained()[0].state_dict().items()}
        tuned = []
        for lr in size.rates:
            for seed in size.seeds:
                report(f"fine-tuning with lr {lr:g}, seed {seed}")
                tuned.append(load_file(fine_tuned(size, lr, seed) / "model.safetensors"))
        rows: list[Row] = []
        found: dict[str, list[dict[str, float]]] = {}
        for system, states in systems(base, tuned, size):
            start, scores = time.perf_counter(), []
            for state in states:
                scores.append(score(state, tests))
            found[system] = scores
            seconds = (time.perf_counter() - start) / len(scores)
            for metric in scores[0]:
                values = [entry[metric] for entry in scores]
                rows.append(Row.from_values(system, metric, values, list(range(len(values))), seconds=seconds))
            report(f"{system}: " + ", ".join(f"{row.metric} {row.mean:.4f}" for row in rows[-len(scores[0]) :]))
        soup = found["uniform soup"][0]["ood_accuracy"]
        for system in ("monosoup", "wise-ft 0.5"):
            beyond = [
                mono["ood_accuracy"] - single["ood_accuracy"] - 0.5 * (soup - single["ood_accuracy"])
                for mono, single in zip(found[system], found["fine-tuned"], strict=True)
            ]
            rows.append(Row.from_values(system, "ood_gain_beyond_half_of_soup", beyond, list(range(len(beyond)))))
        return sorted(rows, key=lambda row: row.metric != "ood_accuracy")  # this one is plotted


def systems(base: State, tuned: Sequence[State], size: Size) -> Iterator[tuple[str, Iterator[State]]]:
    """Name, and its checkpoints: one for each fine-tune, or one of several; each is made when it is asked for."""
    yield "base", iter([base])
    yield "fine-tuned", iter(tuned)
    yield "monosoup", (monosoup(base, state)[0] for state in tuned)
    for alpha in ALPHAS:
        yield f"wise-ft {alpha:g}", (baselines.wise_ft(base, state, alpha) for state in tuned)
    yield "lines", (baselines.lines(base, state) for state in tuned)
    yield "strong directions only", (baselines.low_rank_truncate(base, state) for state in tuned)
    last = tuned[-len(size.seeds) :]
    pairs = [(first, second) for i, first in enumerate(last[:3]) for second in last[i + 1 : 3]]
    yield "model stock of two", (baselines.model_stock(base, pair) for pair in pairs)
    yield "uniform soup", (state for state in [baselines.uniform_soup(tuned)])
    validation = zero_shot.sentences(data.read_table("clinc150", split="validation").rows, names(ID, size), size.others)
    yield (
        "greedy soup",
        (state for state in [baselines.greedy_soup(tuned, lambda state: score(state, {"": validation})[""])]),
    )


def names(domains: Sequence[str], size: Size) -> list[str]:
    """The intents of some domains."""
    return [name for domain in domains for name in zero_shot.intents([domain])[: size.intents]]


@lru_cache
def test_sets(size: Size) -> dict[str, Sentences]:
    rows = data.read_table("clinc150", split="test").rows
    banking = data.read_table("banking77", split="test").rows
    banking_names = sorted({row["intent"] for row in banking})
    draw = random.Random(0)
    garbled = [{**row, "text": garble(row["text"], draw)} for row in rows]
    return {
        "id_accuracy": zero_shot.sentences(rows, names(ID, size), size.each),
        "unseen_intents": zero_shot.sentences(rows, names(OOD, size), size.each),
        "banking77": zero_shot.sentences(banking, banking_names[: 3 * (size.intents or len(banking))], size.others),
        "garbled": zero_shot.sentences(garbled, names(ID, size), size.others),
    }


def garble(text: str, draw: random.Random) -> str:
    """A tenth of the letters replaced, dropped or doubled."""
    return "".join(
        draw.choice([draw.choice(string.ascii_lowercase), "", 2 * letter])
        if letter.isalpha() and draw.random() < NOISE
        else letter
        for letter in text
    )


def score(state: State, tests: Mapping[str, Sentences]) -> dict[str, float]:
    """Accuracy of a checkpoint on each set, and the mean of those that are out of distribution."""
    model = zero_shot.fresh()
    model.load_state_dict(dict(state))
    found = {name: zero_shot.accuracy(model, examples) for name, examples in tests.items()}
    if "id_accuracy" in found:
        shifted = [value for name, value in found.items() if name != "id_accuracy"]
        found["ood_accuracy"] = sum(shifted) / len(shifted)
        found["mean_of_id_and_ood"] = (found["id_accuracy"] + found["ood_accuracy"]) / 2
    return found


def fine_tuned(size: Size, lr: float, seed: int) -> Path:
    """The directory of a checkpoint, made when it is not in the cache."""
    settings: dict[str, Any] = {"domains": ID, "steps": size.steps, "lr": lr, "seed": seed, "intents": size.intents}

    def make(place: Path) -> None:
        rows = data.read_table("clinc150", split="train").rows
        model = zero_shot.fresh()
        zero_shot.fine_tune(model, zero_shot.sentences(rows, names(ID, size)), size.steps, lr, seed)
        save_file(model.state_dict(), place / "model.safetensors")

    return zero_shot.cached("monosoup", settings, make)


CLAIM = MonoSoupClaim()
