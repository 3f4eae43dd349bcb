"""A classification head on an encoder and on a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.recipe import Recipe
from acclimate.tasks.classify import TASK
from conftest import WORDS, colour_rows

RECIPE = Recipe(task="classify", labels=list(WORDS))
ROWS = [{"text": row["text"] + " and so on" * (n % 4), "label": row["label"]} for n, row in enumerate(colour_rows(40))]


@pytest.fixture(scope="module", params=["tiny_encoder", "tiny_lm"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return load_model(
        str(request.getfixturevalue(request.param)), auto_class=TASK.auto_class, **TASK.model_options(RECIPE)
    )


def test_the_head_knows_the_labels(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert model.config.id2label == {0: "red", 1: "green", 2: "blue"}
    assert model.config.label2id == {"red": 0, "green": 1, "blue": 2}


@torch.no_grad()
def test_predictions_equal_the_model_on_each_row_alone(loaded: tuple[Any, Any]) -> None:
    """Padding and the order in batches must not show."""
    model, tokenizer = loaded
    model.train()
    examples = TASK.examples(Table(ROWS, "rows"), RECIPE, tokenizer)
    counts: list[int] = []
    predictions = TASK.predict(model, tokenizer, examples, RECIPE, counts.append)
    assert model.training
    assert sum(counts) == len(ROWS)
    model.eval()
    for row, found in zip(ROWS, predictions, strict=True):
        alone = torch.softmax(model(**tokenizer(row["text"], return_tensors="pt")).logits[0].double(), dim=-1)
        np.testing.assert_allclose(found["_probs"], alone, atol=1e-6)
        assert (found["label"], found["text"]) == (row["label"], row["text"])
    evaluation = TASK.summarise(predictions)
    probs = [row["_probs"] for row in predictions]
    answers = [WORDS.index(row["label"]) for row in ROWS]
    assert evaluation["nll"] == pytest.approx(log_loss(answers, probs, labels=[0, 1, 2]), abs=1e-6)
    assert evaluation["accuracy"] == pytest.approx(np.mean(np.argmax(probs, axis=1) == answers))


def test_labels_come_from_the_data_or_the_recipe() -> None:
    table = Table(ROWS, "rows")
    assert TASK.complete(Recipe(task="classify"), table).labels == ["blue", "green", "red"]
    assert TASK.complete(Recipe(task="classify", labels={"red": "R", "blue": "B"}), table).labels == ["red", "blue"]
    with pytest.raises(InputError, match=r"needs at least two labels; found \['red'\] in 'rows'"):
        TASK.complete(Recipe(task="classify"), Table(ROWS[:1], "rows"))


def test_bad_rows(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    rows = [*ROWS[:2], {"text": "the sun", "label": "grean"}]
    with pytest.raises(
        InputError, match=r"row 3 of 'rows': label 'grean' is not in the label set. Did you mean 'green'"
    ):
        TASK.examples(Table(rows, "rows"), RECIPE, tokenizer)
    examples = TASK.examples(Table(rows, "rows"), RECIPE.replace(skip_bad=True), tokenizer)
    assert (len(examples.items), examples.skipped) == (2, 1)
    with pytest.raises(
        InputError, match=r"has no column 'text' \(needed by task 'classify'\). Columns found: body, label"
    ):
        TASK.examples(Table([{"body": "x", "label": "red"}], "rows"), RECIPE, tokenizer)


def test_long_texts_are_cut_by_the_tokenizer_and_counted(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    rows = [{"text": "grass " * n, "label": "red"} for n in (2, 50, 60)]
    examples = TASK.examples(Table(rows, "rows"), RECIPE.replace(max_length=20), tokenizer)
    assert examples.truncated == 2
    assert examples.lengths[1:] == [20, 20]
    expected = tokenizer(rows[2]["text"], truncation=True, max_length=20)["input_ids"]
    assert examples.items[2]["input_ids"] == expected


def test_the_first_loss_is_the_cross_entropy_of_the_untouched_model(tiny_lm: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = load_model(str(tiny_lm), auto_class=TASK.auto_class, **TASK.model_options(RECIPE))
    recipe = RECIPE.replace(train={"max_steps": 1, "batch_size": 40})
    examples = TASK.examples(Table(ROWS, "rows"), recipe, tokenizer)
    expected = TASK.summarise(TASK.predict(model, tokenizer, examples, recipe))["nll"]
    trainer: Any = TASK.trainer(model, tokenizer, examples, examples, recipe, tmp_path)
    trainer.resume()
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert logged == pytest.approx(expected, abs=1e-4)


def test_a_trained_head_keeps_its_own_order(tiny_encoder: Path, tmp_path: Path) -> None:
    """The data's labels, sorted, are blue, green, red; the model was trained with another order."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    order = ["red", "blue", "green"]
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_encoder, num_labels=3, id2label=dict(enumerate(order)), label2id={name: i for i, name in enumerate(order)}
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_encoder).save_pretrained(tmp_path)
    table = Table([{"text": "the sky", "label": name} for name in WORDS], "rows")
    recipe = Recipe(task="classify", model=str(tmp_path))
    assert TASK.complete(recipe, table).labels == order
    # other labels than the head's need a new head, whose order is free
    assert TASK.complete(recipe.replace(labels=["red", "blue"]), table).labels == ["red", "blue"]
