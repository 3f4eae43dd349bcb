"""Completions: which tokens carry the loss, and that TRL's loss is our score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.metrics import ece
from acclimate.models import load_model
from acclimate.recipe import Recipe
from acclimate.tasks.sft import TASK

PAIRS = [
    {"id": "a", "prompt": "the sky is", "completion": " blue"},
    {"id": "b", "prompt": "a leaf and a frog are", "completion": " green, and so is the grass"},
    {"id": "c", "prompt": "rose", "completion": " red red red"},
    {"id": "d", "prompt": "jeans and the sea", "completion": " blue blue"},
]
CHATS = [
    {
        "id": "chat",
        "messages": [
            {"role": "user", "content": "the sky"},
            {"role": "assistant", "content": "blue"},
            {"role": "user", "content": "the grass"},
            {"role": "assistant", "content": "green as a frog"},
        ],
    },
    {"id": "short", "messages": [{"role": "user", "content": "a brick"}, {"role": "assistant", "content": "red"}]},
]
RECIPE = Recipe(task="sft")


@pytest.fixture(scope="module")
def loaded(tiny_lm: Path) -> tuple[Any, Any]:
    return load_model(str(tiny_lm))


def test_prompt_and_completion(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    examples = TASK.examples(Table(PAIRS, "rows"), RECIPE, tokenizer)
    for row, item, length in zip(PAIRS, examples.items, examples.lengths, strict=True):
        assert item.prompt == tokenizer(row["prompt"])["input_ids"]
        assert item.choices == [[*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]]
        assert length == len(item.prompt) + len(item.choices[0])


def test_every_assistant_turn_is_an_example(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    examples = TASK.examples(Table(CHATS, "rows"), RECIPE, tokenizer)
    texts = [(tokenizer.decode(item.prompt), tokenizer.decode(item.choices[0])) for item in examples.items]
    first = "<|user|> the sky<|end|>\n<|assistant|>"
    second = f"{first} blue<|end|>\n<|user|> the grass<|end|>\n<|assistant|>"
    assert texts == [
        (first, " blue<|end|>\n"),
        (second, " green as a frog<|end|>\n"),
        ("<|user|> a brick<|end|>\n<|assistant|>", " red<|end|>\n"),
    ]
    # predictions are matched by id, so the turns of a chat need their own
    assert [row["id"] for row in examples.rows] == ["chat/1", "chat/2", "short"]


def test_prompts_may_be_messages_and_completions_text(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    row = {"prompt": CHATS[1]["messages"][:1], "completion": "red"}
    chat = TASK.examples(Table([CHATS[1]], "rows"), RECIPE, tokenizer).items
    assert TASK.examples(Table([row], "rows"), RECIPE, tokenizer).items == chat
    row["completion"] = CHATS[1]["messages"][1:]
    assert TASK.examples(Table([row], "rows"), RECIPE, tokenizer).items == chat


def test_rows_to_complete_need_no_completion(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    (item,) = TASK.examples(Table([{"prompt": "the sky is"}], "input"), RECIPE, tokenizer, labelled=False).items
    assert item.prompt == tokenizer("the sky is")["input_ids"]
    # a chat with its answer asks for that answer again, a chat without asks for the next one
    whole = TASK.examples(Table([CHATS[1]], "input"), RECIPE, tokenizer, labelled=False).items
    open_chat = [{"messages": CHATS[1]["messages"][:1]}]
    assert whole == TASK.examples(Table(open_chat, "input"), RECIPE, tokenizer, labelled=False).items
    assert tokenizer.decode(whole[0].prompt) == "<|user|> a brick<|end|>\n<|assistant|> "


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "'messages' must be a list of"),
        ({"messages": [{"role": "user"}]}, "'messages' must be a list of"),
        ({"messages": [{"role": "user", "content": "x"}]}, "'messages' has no assistant turn to learn from"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "'messages' has no assistant turn to learn from"),
    ],
)
def test_chats_that_teach_nothing(loaded: tuple[Any, Any], row: dict[str, Any], message: str) -> None:
    table = Table([CHATS[1], row], "rows")
    with pytest.raises(InputError, match=f"row 2 of 'rows': {message}"):
        TASK.examples(table, RECIPE, loaded[1])
    examples = TASK.examples(table, RECIPE.replace(skip_bad=True), loaded[1])
    assert (len(examples.items), examples.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 5, "completion": "x"}, "'prompt' must be text or a list of"),
        ({"prompt": "x", "completion": 5}, "'completion' must be text or a list of"),
        (
            {"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]},
            "the prompt is text but the answer is a list",
        ),
    ],
)
def test_pairs_that_are_no_text(loaded: tuple[Any, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"row 2 of 'rows': {message}"):
        TASK.examples(Table([PAIRS[0], row], "rows"), RECIPE, loaded[1])


def test_long_prompts_lose_their_start_and_completions_stay_whole(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    rows = [{"prompt": "grass " * 30, "completion": " red red"}, PAIRS[0]]
    examples = TASK.examples(Table(rows, "rows"), RECIPE.replace(max_length=12), tokenizer)
    assert examples.truncated == 1
    answer = [*tokenizer(" red red")["input_ids"], tokenizer.eos_token_id]
    assert examples.items[0].choices == [answer]
    assert examples.items[0].prompt == tokenizer("grass " * 30)["input_ids"][-(12 - len(answer)) :]
    with pytest.raises(InputError, match=r"the answer of row 1 of 'rows' has \d+ tokens, more than the limit of 12"):
        TASK.examples(
            Table([{"prompt": "x", "completion": "grass " * 30}], "rows"), RECIPE.replace(max_length=12), tokenizer
        )


@torch.no_grad()
def plain_probabilities(model: Any, items: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, V) probabilities at the positions of all completions, and the tokens that stand there."""
    tables, targets = [], []
    for item in items:
        answer = list(item.choices[0])
        logits = model.eval()(torch.tensor([[*item.prompt, *answer]])).logits[0, len(item.prompt) - 1 : -1]
        tables.append(torch.softmax(logits.double(), dim=-1).numpy())
        targets += answer
    return np.concatenate(tables), np.array(targets)


def test_scores_equal_those_of_the_plain_logits(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    examples = TASK.examples(Table(PAIRS, "rows"), RECIPE, tokenizer)
    predictions = TASK.predict(model, tokenizer, examples, RECIPE)
    evaluation = TASK.summarise(predictions)
    for item, row in zip(examples.items, predictions, strict=True):
        p, y = plain_probabilities(model, [item])
        assert row["nll"] == pytest.approx(-np.log(p[range(len(y)), y]).mean(), abs=1e-5)
        assert row["tokens"] == len(y)
        assert row["token_accuracy"] == pytest.approx((p.argmax(axis=1) == y).mean())
    p, y = plain_probabilities(model, examples.items)
    nll = -np.log(p[range(len(y)), y]).mean()
    assert evaluation["nll"] == pytest.approx(nll, abs=1e-5)
    assert evaluation["perplexity"] == pytest.approx(np.exp(nll), rel=1e-5)
    assert evaluation["accuracy"] == pytest.approx((p.argmax(axis=1) == y).mean())
    assert evaluation["brier"] == pytest.approx(((p - np.eye(p.shape[1])[y]) ** 2).sum(axis=1).mean(), abs=1e-5)
    assert evaluation["ece"] == pytest.approx(ece(p, y), abs=1e-5)


@pytest.mark.parametrize("micro", [None, 1], ids=["one pass", "accumulated"])
@pytest.mark.parametrize("rows", [PAIRS, CHATS], ids=["pairs", "chats"])
def test_trls_first_loss_is_our_nll(
    tiny_lm: Path, tmp_path: Path, rows: list[dict[str, Any]], micro: int | None
) -> None:
    """So the loss is that of the completion's tokens alone, each with the same weight."""
    model, tokenizer = load_model(str(tiny_lm))
    count = 3 if rows is CHATS else 4
    recipe = RECIPE.replace(train={"max_steps": 1, "batch_size": count, "micro_batch_size": micro})
    examples = TASK.examples(Table(rows, "rows"), recipe, tokenizer)
    expected = TASK.summarise(TASK.predict(model, tokenizer, examples, recipe))["nll"]
    trainer: Any = TASK.trainer(model, tokenizer, examples, examples, recipe, tmp_path)
    trainer.resume()
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert logged == pytest.approx(expected, abs=1e-4)
