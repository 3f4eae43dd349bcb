"""Preferences: margins from plain logits, and TRL's loss at the start."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.pipeline import tune
from acclimate.recipe import Recipe
from acclimate.tasks.dpo import TASK
from conftest import write_jsonl

ROWS = [
    {"id": "a", "prompt": "the sky is", "chosen": " blue", "rejected": " green grass"},
    {"id": "b", "prompt": "a leaf", "chosen": " green as a frog", "rejected": " red"},
    {"id": "c", "prompt": "rose", "chosen": " red", "rejected": " blue"},
    {"id": "d", "prompt": "the sea and the jeans", "chosen": " blue blue", "rejected": " red brick red"},
]
RECIPE = Recipe(task="dpo")


@pytest.fixture(scope="module")
def loaded(tiny_lm: Path) -> tuple[Any, Any]:
    return load_model(str(tiny_lm))


def test_both_answers_follow_the_prompt_and_end(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    examples = TASK.examples(Table(ROWS, "rows"), RECIPE, tokenizer)
    for row, item, length in zip(ROWS, examples.items, examples.lengths, strict=True):
        assert item.prompt == tokenizer(row["prompt"])["input_ids"]
        assert item.choices == [
            [*tokenizer(row[side])["input_ids"], tokenizer.eos_token_id] for side in ("chosen", "rejected")
        ]
        assert length == 2 * len(item.prompt) + sum(map(len, item.choices))


def test_chats(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    row = {
        "prompt": [{"role": "user", "content": "the sky"}],
        "chosen": [{"role": "assistant", "content": "blue"}],
        "rejected": "red",
    }
    (item,) = TASK.examples(Table([row], "rows"), RECIPE, tokenizer).items
    assert tokenizer.decode(item.prompt) == "<|user|> the sky<|end|>\n<|assistant|>"
    assert [tokenizer.decode(answer) for answer in item.choices] == [" blue<|end|>\n", " red<|end|>\n"]


def test_long_prompts_lose_their_start_for_the_longer_answer(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    row = {"prompt": "grass " * 30, "chosen": " red", "rejected": " red red red"}
    examples = TASK.examples(Table([row], "rows"), RECIPE.replace(max_length=12), tokenizer)
    (item,) = examples.items
    assert examples.truncated == 1
    assert len(item.prompt) + max(map(len, item.choices)) == 12
    assert item.prompt == tokenizer(row["prompt"])["input_ids"][-len(item.prompt) :]


def test_missing_columns_and_wrong_forms(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(
        InputError, match=r"has no column 'rejected' \(needed by task 'dpo'\). Columns found: id, prompt, chosen"
    ):
        TASK.examples(Table([{k: v for k, v in ROWS[0].items() if k != "rejected"}], "rows"), RECIPE, loaded[1])
    with pytest.raises(InputError, match="row 1 of 'rows': 'rejected' must be text or a list of"):
        TASK.examples(Table([{**ROWS[0], "rejected": 7}], "rows"), RECIPE, loaded[1])


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], answer: list[int]) -> np.ndarray:
    table = torch.log_softmax(model.eval()(torch.tensor([[*prompt, *answer]])).logits[0].double(), dim=-1)
    return np.array([table[len(prompt) + i - 1, token].item() for i, token in enumerate(answer)])


def test_margins_and_metrics_equal_those_of_plain_logits(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    examples = TASK.examples(Table(ROWS, "rows"), RECIPE, tokenizer)
    predictions = TASK.predict(model, tokenizer, examples, RECIPE)
    pairs = [[logprobs(model, list(i.prompt), list(c)) for c in i.choices] for i in examples.items]
    margins = [chosen.sum() - rejected.sum() for chosen, rejected in pairs]
    correct = [chosen.mean() > rejected.mean() for chosen, rejected in pairs]
    np.testing.assert_allclose([row["margin"] for row in predictions], margins, atol=1e-4)
    assert [row["correct"] for row in predictions] == correct
    assert 0 < sum(correct) < len(correct)  # otherwise the comparison above says little
    evaluation = TASK.summarise(predictions)
    nll = -np.concatenate([chosen for chosen, _ in pairs]).mean()
    assert evaluation["margin"] == pytest.approx(np.mean(margins), abs=1e-4)
    assert evaluation["accuracy"] == pytest.approx(np.mean(correct))
    assert evaluation["nll"] == pytest.approx(nll, abs=1e-5)
    assert evaluation["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_trl_starts_at_ln_2_and_tuning_raises_the_margin(tiny_lm: Path, tmp_path: Path, adapter: str) -> None:
    """At the start policy and reference are the same model, so the loss is -log sigmoid(0)."""
    rows = [{**row, "id": str(n)} for n, row in enumerate(ROWS * 4)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    train = {"max_steps": 25, "batch_size": 16, "lr": 1e-2 if adapter == "lora" else 1e-3, "warmup": 0}
    recipe = Recipe(model=str(tiny_lm), data=str(data), eval_data=str(data), task="dpo", adapter=adapter, train=train)
    run = tune(recipe, directory=tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.5
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["after"]["metrics"]["margin"]["value"] > evaluation["before"]["metrics"]["margin"]["value"] + 1
    assert evaluation["after"]["metrics"]["accuracy"]["value"] == 1.0
