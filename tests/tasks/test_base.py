"""What the tasks share: prompts, lengths, labels, and the comparison of two sets of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.recipe import Recipe
from acclimate.tasks import TASKS, base, get_task

CHAT = [{"role": "user", "content": "the sky"}]
ANSWER = [{"role": "assistant", "content": "blue"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_lm: Path) -> Any:
    return load_model(str(tiny_lm))[1]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_found_by_its_name(name: str) -> None:
    task = get_task(name)
    assert task.name == name
    assert isinstance(task.higher_is_better, bool)


# --- lengths ---


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(1, 20), st.integers(21, 60))
def test_a_prompt_loses_its_start_and_only_what_it_must(prompt: list[int], answer: int, limit: int) -> None:
    kept, cut = base.fit(prompt, answer, limit, "row 1")
    assert len(kept) + answer <= limit
    assert kept == prompt[len(prompt) - len(kept) :]
    assert cut == (len(prompt) + answer > limit)
    assert len(kept) == min(len(prompt), limit - answer)


def test_an_answer_that_does_not_fit_is_never_cut() -> None:
    with pytest.raises(InputError, match=r"the answer of row 7 of 'x' has 16 tokens, more than the limit of 16"):
        base.fit([1, 2], 16, 16, "row 7 of 'x'")
    assert base.fit([1, 2], 15, 16, "row 7 of 'x'") == ([2], True)


def test_the_context_is_the_models_up_to_1024(tokenizer: Any) -> None:
    assert base.context_length(Recipe(), tokenizer) == 256
    assert base.context_length(Recipe(max_length=100), tokenizer) == 100
    with pytest.raises(InputError, match="max_length 257 is more than the model's context of 256 tokens"):
        base.context_length(Recipe(max_length=257), tokenizer)
    tokenizer_of_a_large_model = type("Tokenizer", (), {"model_max_length": 131_072})()
    assert base.context_length(Recipe(), tokenizer_of_a_large_model) == 1024
    assert base.context_length(Recipe(max_length=5000), tokenizer_of_a_large_model) == 5000


# --- templates ---


def test_templates_name_their_columns() -> None:
    assert base.placeholders("{a} and {b:>5} and {a!r} {{not me}}") == ["a", "b"]
    assert base.fill_template("{a}: {b:>3}{{x}}", {"a": "{b}", "b": "é"}, "row 1") == "{b}:   é{x}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Request: {text", "cannot be read: expected '}' before end of string. Write {{ and }} for literal braces"),
        ("Request:", "has no {column} placeholder"),
        ("{{text}}", "has no {column} placeholder"),
    ],
)
def test_templates_that_cannot_work(template: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        base.placeholders(template)
    assert message in str(caught.value)
    assert repr(template) in str(caught.value)


def test_a_value_that_the_template_cannot_format() -> None:
    with pytest.raises(InputError, match=r"row 3 does not fit the template '\{price:\.2f\}'"):
        base.fill_template("{price:.2f}", {"price": "cheap"}, "row 3")


# --- chats ---


def test_a_pair_of_texts_is_tokenised_apart_and_ends(tokenizer: Any) -> None:
    prompt, answer = base.tokenise_pair(tokenizer, "the sky is", " blue", "row 1")
    assert prompt == tokenizer("the sky is")["input_ids"]
    assert answer == [*tokenizer(" blue")["input_ids"], tokenizer.eos_token_id]
    # an end token that stands in the text is not doubled
    assert base.tokenise_pair(tokenizer, "the sky is", " blue<|end|>", "row 1")[1] == answer


def test_a_chat_goes_through_the_template_and_parts_at_the_answer(tokenizer: Any) -> None:
    prompt, answer = base.tokenise_pair(tokenizer, CHAT, ANSWER, "row 1")
    assert (
        tokenizer.decode(prompt) == "<|user|> the sky<|end|>\n<|assistant|>"
    )  # the space belongs to the token " blue"
    assert tokenizer.decode(prompt + answer) == "<|user|> the sky<|end|>\n<|assistant|> blue<|end|>\n"
    assert base.tokenise_pair(tokenizer, CHAT, "blue", "row 1") == (prompt, answer)


def test_chats_that_cannot_be_rendered(tokenizer: Any, tiny_lm: Path) -> None:
    with pytest.raises(InputError, match="row 4: the prompt is text but the answer is a list of messages"):
        base.tokenise_pair(tokenizer, "text", ANSWER, "row 4")
    other = load_model(str(tiny_lm))[1]
    other.chat_template = None
    for function in (
        lambda: base.tokenise_pair(other, CHAT, ANSWER, "row 4"),
        lambda: base.tokenise_prompt(other, CHAT, "row 4"),
    ):
        with pytest.raises(InputError, match="row 4: these are chat messages, but this model has no chat template"):
            function()
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        InputError, match="row 4: the model's chat template refuses these messages: roles must alternate"
    ):
        base.tokenise_prompt(other, CHAT, "row 4")


@pytest.mark.parametrize("value", [5, None, ["text"], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_text_is_text_or_messages(value: Any) -> None:
    with pytest.raises(
        InputError, match=r"row 2: 'prompt' must be text or a list of \{\"role\": ..., \"content\": ...\}, not"
    ):
        base.check_text({"prompt": value}, ["prompt"], "row 2")
    base.check_text({"prompt": "text", "chosen": CHAT}, ["prompt", "chosen"], "row 2")


# --- labels ---


def test_labels_are_found_sorted_and_missing_ones_guessed() -> None:
    table = Table([{"label": name} for name in ("b", "a", "b", 3)], "rows")
    assert base.labels_found(table, Recipe(), "classify") == ["3", "a", "b"]
    assert base.label_index(3, ["3", "a"], "row 1") == 0
    with pytest.raises(
        InputError, match=r"row 5: label 'gren' is not in the label set. Did you mean 'green'\? Labels: red, green"
    ):
        base.label_index("gren", ["red", "green"], "row 5")


def test_a_thousand_labels_are_taken_for_a_wrong_column() -> None:
    table = Table([{"label": str(i)} for i in range(1001)], "rows.csv")
    with pytest.raises(InputError, match=r"column 'label' of 'rows\.csv' has 1001 different values"):
        base.labels_found(table, Recipe(), "classify")


def test_a_prediction_row_says_what_how_sure_and_how_well() -> None:
    probs = np.array([0.1, 0.7, 0.2])
    row = base.describe(probs, ["a", "b", "c"], 2)
    assert (row["prediction"], row["confidence"], row["label"], row["correct"]) == ("b", 0.7, "c", False)
    assert row["nll"] == pytest.approx(-np.log(0.2))
    assert list(row["probs"].items()) == [("b", 0.7), ("c", 0.2), ("a", 0.1)]
    assert not {"label", "correct", "nll"} & base.describe(probs, ["a", "b", "c"], None).keys()
    many = base.describe(np.ones(50) / 50, [str(i) for i in range(50)], 0)
    assert len(many["probs"]) == 20


# --- comparison ---


def test_differences_match_rows_by_id_and_weigh_tokens() -> None:
    before = [
        {"id": i, "nll": n, "tokens": t, "token_accuracy": a}
        for i, n, t, a in (("a", 2.0, 1, 0.0), ("b", 1.0, 3, 1 / 3), ("c", 4.0, 2, 0.5))
    ]
    after = [
        {"id": i, "nll": n, "tokens": t, "token_accuracy": a}
        for i, n, t, a in (("c", 1.0, 2, 1.0), ("a", 1.0, 1, 1.0), ("b", 0.5, 3, 2 / 3))
    ]
    found = base.differences(after, before)

    def per_token(rows: list[dict[str, Any]], key: str) -> float:
        return sum(row[key] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)

    assert found["nll"]["value"] == pytest.approx(per_token(after, "nll") - per_token(before, "nll"))
    accuracy = per_token(after, "token_accuracy") - per_token(before, "token_accuracy")
    assert found["accuracy"]["value"] == pytest.approx(accuracy)
    assert "tuned" in found["nll"]["words"]
    assert "untouched" in found["nll"]["words"]


def test_differences_are_paired() -> None:
    """Every row gains exactly one nat, whatever it had: paired by id, there is no uncertainty at all."""
    values = np.random.default_rng(0).uniform(2, 9, size=30)
    before = [{"id": str(i), "correct": False, "nll": value} for i, value in enumerate(values)]
    after = [{**row, "nll": row["nll"] - 1} for row in before]
    found = base.differences(after[::-1], before)["nll"]
    assert (found["low"], found["value"], found["high"]) == pytest.approx((-1, -1, -1))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 5), st.floats(0, 5)), min_size=2, max_size=12))
def test_differences_of_classifiers_are_differences_of_means(rows: list[tuple[bool, bool, float, float]]) -> None:
    before = [{"id": str(i), "correct": row[0], "nll": row[2]} for i, row in enumerate(rows)]
    after = [{"id": str(i), "correct": row[1], "nll": row[3]} for i, row in enumerate(rows)]
    found = base.differences(after[::-1], before)
    assert found["accuracy"]["value"] == pytest.approx(np.mean([r[1] for r in rows]) - np.mean([r[0] for r in rows]))
    assert found["nll"]["value"] == pytest.approx(np.mean([r[3] - r[2] for r in rows]), abs=1e-9)
