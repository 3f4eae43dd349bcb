"""Label words and multiple choice: the right tokens, the right probabilities, the right loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.recipe import Recipe
from acclimate.tasks.base import Examples
from acclimate.tasks.choice import TASK
from conftest import WORDS, colour_rows

QUESTIONS = [
    {"prompt": "the sky is", "choices": ["blue", "green grass", "red"], "answer": 0},
    {"prompt": "a leaf is", "choices": ["blue sky", "green"], "answer": "green"},
    {"prompt": "the rose is", "choices": ["blue", "green", "red", "a brick"], "answer": 2},
]


@pytest.fixture(scope="module")
def loaded(tiny_lm: Path) -> tuple[Any, Any]:
    return load_model(str(tiny_lm))


def examples_of(
    rows: list[dict[str, Any]], tokenizer: Any, labelled: bool = True, **fields: Any
) -> tuple[Recipe, Examples]:
    table = Table(rows, "rows.jsonl")
    recipe = (
        TASK.complete(Recipe(task="choice", **fields), table)
        if labelled or fields.get("labels")
        else Recipe(task="choice", **fields)
    )
    return recipe, TASK.examples(table, recipe, tokenizer, labelled)


@torch.no_grad()
def naive_logprob(model: Any, prompt: list[int], choice: list[int]) -> float:
    table = torch.log_softmax(model.eval()(torch.tensor([[*prompt, *choice]])).logits[0].double(), dim=-1)
    return sum(table[len(prompt) + i - 1, token].item() for i, token in enumerate(choice))


# --- rows to tokens ---


def test_label_words_follow_the_filled_template(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    recipe, examples = examples_of(
        colour_rows(6),
        tokenizer,
        template="Say {text}:",
        labels={"red": "red", "green": "leaf green", "blue": "  blue"},
    )
    item = examples.items[1].item
    assert item.prompt == tokenizer(f"Say {colour_rows(6)[1]['text']}:")["input_ids"]
    assert [tokenizer.decode(choice) for choice in item.choices] == [" red", " leaf green", " blue"]
    assert [example.answer for example in examples.items] == [0, 1, 2, 0, 1, 2]
    longest = max(map(len, item.choices))
    assert examples.lengths[1] == len(item.prompt) + longest - 1
    assert recipe.template == "Say {text}:"


def test_labels_come_from_the_data_with_underscores_as_spaces() -> None:
    rows = [{"text": "x", "label": name} for name in ("pay_bill", "greeting", "pay_bill")]
    recipe = TASK.complete(Recipe(task="choice"), Table(rows, "rows"))
    assert recipe.labels == {"greeting": "greeting", "pay_bill": "pay bill"}
    assert recipe.template == "{text}\nAnswer:"
    listed = TASK.complete(Recipe(task="choice", labels=["pay_bill", "other"]), Table(rows, "rows"))
    assert listed.labels == {"pay_bill": "pay_bill", "other": "other"}


def test_multiple_choice_takes_an_index_or_the_text_of_a_choice(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    _, examples = examples_of(QUESTIONS, tokenizer)
    assert [example.answer for example in examples.items] == [0, 1, 2]
    assert examples.items[1].names == ["blue sky", "green"]
    assert tokenizer.decode(examples.items[0].item.prompt) == "Question: the sky is\nAnswer:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 3}, "answer 3 is not an index of its 3 choices (0 is the first)"),
        ({"answer": -1}, "answer -1 is not an index"),
        ({"answer": True}, "label 'True' is not in the label set"),
        ({"answer": "bleu"}, "label 'bleu' is not in the label set. Did you mean 'blue'?"),
        ({"choices": ["blue"]}, "has 1 choices; at least two are needed"),
        ({"choices": "blue, green"}, "'choices' must be a list, not 'blue, green'. CSV has no lists"),
    ],
)
def test_bad_questions(loaded: tuple[Any, Any], change: dict[str, Any], message: str) -> None:
    rows = [QUESTIONS[1], {**QUESTIONS[0], **change}]
    with pytest.raises(InputError) as caught:
        examples_of(rows, loaded[1])
    assert f"row 2 of 'rows.jsonl'{':' if 'has 1' not in message else ''} {message}" in str(caught.value)


def test_a_label_outside_the_set(loaded: tuple[Any, Any]) -> None:
    rows = [*colour_rows(3), {"text": "the sun", "label": "yellow"}]
    with pytest.raises(
        InputError, match=r"row 4 of 'rows.jsonl': label 'yellow' is not in the label set.* Labels: red, green, blue"
    ):
        examples_of(rows, loaded[1], labels=list(WORDS))
    _, examples = examples_of(rows, loaded[1], labels=list(WORDS), skip_bad=True)
    assert (len(examples.items), examples.skipped) == (3, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": ["red"]}, "needs at least two labels; found ['red']"),
        ({"labels": {"a": "red", "b": "red "}}, "two labels stand for the same words"),
        ({"labels": {"a": "red", "b": " "}}, "the choice ' ' is empty; give it words"),
        ({"template": "{body}"}, "has no column 'body' (needed by task 'choice'). Columns found: text, label"),
        ({"template": "no column"}, "has no {column} placeholder"),
        ({"template": "{text:.2f}"}, "row 1 of 'rows.jsonl' does not fit the template"),
    ],
)
def test_recipes_that_do_not_fit_the_rows(loaded: tuple[Any, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        examples_of(colour_rows(6), loaded[1], **{"labels": list(WORDS), **fields})
    assert message in str(caught.value)


def test_a_row_without_the_templates_column_is_not_scored_as_an_empty_prompt(loaded: tuple[Any, Any]) -> None:
    rows: list[dict[str, Any]] = [*colour_rows(3), {"label": "red"}, {"text": None, "label": "red"}]
    with pytest.raises(InputError, match=r"row 4 of 'rows\.jsonl' has nothing in column 'text'"):
        examples_of(rows, loaded[1])
    assert examples_of(rows, loaded[1], skip_bad=True)[1].skipped == 2
    recipe = Recipe(task="choice", labels={"a": "a", "b": "b"}, template="{text}")
    with pytest.raises(InputError, match="row 4 of 'input' has nothing in column 'text'"):
        TASK.examples(Table(rows, "input"), recipe, loaded[1], labelled=False)


def test_what_makes_a_row_the_same_are_the_columns_that_it_uses() -> None:
    assert TASK.content(Recipe(template="{context}: {question}")) == (
        "context",
        "question",
        "choices",
        "label",
        "answer",
    )


def test_long_prompts_lose_their_start_and_answers_stay_whole(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    rows = [{"text": "grass " * n, "label": "red"} for n in (1, 100)] + [{"text": "sky", "label": "blue"}]
    labels = {"red": "red and blue and green", "blue": "blue"}
    _, examples = examples_of(rows, tokenizer, labels=labels, template="{text}\nAnswer:", max_length=40)
    assert examples.truncated == 1
    whole = tokenizer(f"{rows[1]['text']}\nAnswer:")["input_ids"]
    choices = [tokenizer(f" {words}")["input_ids"] for words in labels.values()]
    assert examples.items[1].item.choices == choices
    assert examples.items[1].item.prompt == whole[-(40 - len(choices[0])) :]
    with pytest.raises(
        InputError, match=r"the answer of row 1 of 'rows.jsonl' has \d+ tokens, more than the limit of 9"
    ):
        examples_of(rows, tokenizer, labels={"red": "red " * 12, "blue": "blue"}, max_length=9)


# --- scores ---


@pytest.mark.parametrize("normalise", [False, True])
def test_probabilities_are_the_softmax_of_the_choices_logprobs(loaded: tuple[Any, Any], normalise: bool) -> None:
    model, tokenizer = loaded
    recipe, examples = examples_of(QUESTIONS, tokenizer, length_normalise=normalise)
    rows = TASK.predict(model, tokenizer, examples, recipe)
    for row, example in zip(rows, examples.items, strict=True):
        values = [
            naive_logprob(model, list(example.item.prompt), list(c)) / (len(c) if normalise else 1)
            for c in example.item.choices
        ]
        expected = np.exp(values) / np.exp(values).sum()
        np.testing.assert_allclose(row["_probs"], expected, atol=1e-5)
        assert row["prediction"] == example.names[int(np.argmax(expected))]
        assert row["label"] == example.names[example.answer]
        assert row["correct"] == (int(np.argmax(expected)) == example.answer)
        assert row["nll"] == pytest.approx(-np.log(expected[example.answer]), abs=1e-4)


def test_rows_without_answer_get_the_same_prediction_and_no_score(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    rows = colour_rows(9)
    recipe, examples = examples_of(rows, tokenizer, labels=list(WORDS))
    known = TASK.predict(model, tokenizer, examples, recipe)
    bare = TASK.examples(Table([{"text": row["text"]} for row in rows], "input"), recipe, tokenizer, labelled=False)
    unknown = TASK.predict(model, tokenizer, bare, recipe)
    assert [row["probs"] for row in unknown] == [row["probs"] for row in known]
    assert not any("label" in row or "correct" in row or "nll" in row for row in unknown)


def test_the_summary_equals_scikit_learn_on_the_probabilities(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    rows = colour_rows(40)
    recipe, examples = examples_of(rows, tokenizer, labels=list(WORDS))
    predictions = TASK.predict(model, tokenizer, examples, recipe)
    evaluation = TASK.summarise(predictions)
    probs = np.array([row["_probs"] for row in predictions])
    answers = np.array([WORDS.index(row["label"]) for row in rows])
    assert evaluation["accuracy"] == pytest.approx(accuracy_score(answers, probs.argmax(axis=1)))
    assert evaluation["nll"] == pytest.approx(log_loss(answers, probs, labels=[0, 1, 2]), abs=1e-6)
    assert evaluation["macro_f1"] == pytest.approx(
        f1_score(answers, probs.argmax(axis=1), average="macro", zero_division=0)
    )
    assert evaluation["brier"] == pytest.approx(((probs - np.eye(3)[answers]) ** 2).sum(axis=1).mean())
    by_class = {row["class"]: row for row in evaluation.per_class or []}
    assert {name: row["n"] for name, row in by_class.items()} == {"red": 14, "green": 13, "blue": 13}
    assert not any(key.startswith("_") for row in evaluation.predictions for key in row)


def test_choices_of_any_number_are_summarised_together(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    recipe, examples = examples_of(QUESTIONS, tokenizer)
    predictions = TASK.predict(model, tokenizer, examples, recipe)
    evaluation = TASK.summarise(predictions)
    assert evaluation["nll"] == pytest.approx(np.mean([row["nll"] for row in predictions]))
    assert evaluation["accuracy"] == pytest.approx(np.mean([row["correct"] for row in predictions]))


# --- training ---


@pytest.mark.parametrize("micro", [None, 5], ids=["one pass", "accumulated"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("form", ["single tokens", "long words", "questions"])
def test_the_first_loss_is_that_of_the_untouched_model(
    form: str, normalise: bool, micro: int | None, tiny_lm: Path, tmp_path: Path
) -> None:
    """Over a batch of all rows, before any step: cross-entropy over single-token choices, else -log p of the answer."""
    model, tokenizer = load_model(str(tiny_lm))
    labels = {"red": "red", "green": "grass green", "blue": "sea blue sky"} if form == "long words" else list(WORDS)
    rows = QUESTIONS * 5 if form == "questions" else colour_rows(15)
    fields: dict[str, Any] = {
        "length_normalise": normalise,
        "train": {"max_steps": 1, "batch_size": 15, "micro_batch_size": micro},
    }
    recipe, examples = examples_of(rows, tokenizer, **fields, **({} if form == "questions" else {"labels": labels}))
    restricted = all(len(c) == 1 for e in examples.items for c in e.item.choices)
    assert restricted == (form == "single tokens")
    losses = []
    for example in examples.items:
        values = np.array(
            [
                naive_logprob(model, list(example.item.prompt), list(c)) / (len(c) if normalise else 1)
                for c in example.item.choices
            ]
        )
        losses.append((np.log(np.exp(values).sum()) if restricted else 0.0) - values[example.answer])
    trainer: Any = TASK.trainer(model, tokenizer, examples, examples, recipe, tmp_path)
    trainer.resume()
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert logged == pytest.approx(np.mean(losses), abs=1e-4)


def test_the_evaluation_loss_during_training_is_that_of_the_held_out_rows(tiny_lm: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(str(tiny_lm))
    train = {"max_steps": 1, "batch_size": 6, "lr": 1e-30, "eval_every": 1}
    recipe, examples = examples_of(colour_rows(6), tokenizer, labels=list(WORDS), train=train)
    _, held_out = examples_of(colour_rows(9, seed=1), tokenizer, labels=list(WORDS))
    expected = TASK.summarise(TASK.predict(model, tokenizer, held_out, recipe))["nll"]
    trainer: Any = TASK.trainer(model, tokenizer, examples, held_out, recipe, tmp_path)
    trainer.resume()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [pytest.approx(expected, abs=1e-4)]
