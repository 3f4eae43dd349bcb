"""Multiple choice and label words with a causal LM: train on the answer, score by the log-probabilities of the choices.

Two forms of rows. *Label words*: `text` and `label`; the choices are the same for all rows and `template` puts the text into
a prompt. *Multiple choice*: `prompt`, `choices` (a list) and `answer` (an index or the text of a choice).

With p_c the probability of choice c's tokens after the prompt, the prediction is the softmax of log p_c over the choices
(of log p_c / tokens with `length_normalise`). Where every choice is a single token the training loss is the cross-entropy of
that same softmax; otherwise it is -log p of the right answer. Either way logits are computed only where they are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from acclimate.arguments import arguments
from acclimate.data import Row, Table, require_columns
from acclimate.errors import InputError
from acclimate.recipe import Recipe
from acclimate.scoring import (
    Item,
    Score,
    choice_logprobs,
    edge_logprobs,
    pack,
    score_copies,
    scored_logits,
)
from acclimate.tasks.base import (
    Draws,
    Evaluation,
    Examples,
    Task,
    classification,
    context_length,
    describe_samples,
    fill_template,
    fit,
    label_index,
    labels_found,
    placeholders,
    sharded,
)
from acclimate.training import ExampleMeanTrainer

DEFAULT_TEMPLATE = "{text}\nAnswer:"
MULTIPLE_CHOICE_TEMPLATE = "Question: {prompt}\nAnswer:"


@dataclass(frozen=True)
class _Example:
    item: Item
    names: list[str]
    answer: int | None


class Choice(Task):
    name = "choice"
    averages = True

    def complete(self, recipe: Recipe, table: Table) -> Recipe:
        if "choices" in table.columns:
            return recipe.replace(template=recipe.template or MULTIPLE_CHOICE_TEMPLATE)
        changes: dict[str, Any] = {"template": recipe.template or DEFAULT_TEMPLATE}
        if recipe.labels is None:
            changes["labels"] = {label: label.replace("_", " ") for label in labels_found(table, recipe, self.name)}
        elif isinstance(recipe.labels, list):
            changes["labels"] = {label: label for label in recipe.labels}
        recipe = recipe.replace(**changes)
        assert isinstance(recipe.labels, dict)
        if len(recipe.labels) < 2:
            raise InputError(f"a choice needs at least two labels; found {list(recipe.labels)} in '{table.source}'")
        if len({words.strip() for words in recipe.labels.values()}) < len(recipe.labels):
            raise InputError("two labels stand for the same words; give each its own in 'labels'")
        return recipe

    def content(self, recipe: Recipe) -> tuple[str, ...]:
        return (*placeholders(recipe.template or DEFAULT_TEMPLATE), "choices", "label", "answer")

    def examples(self, table: Table, recipe: Recipe, tokenizer: Any, labelled: bool = True) -> Examples:
        multiple = "choices" in table.columns
        template = recipe.template or DEFAULT_TEMPLATE
        needed = (["choices"] if multiple else []) + ([("answer" if multiple else "label")] if labelled else [])
        table = require_columns(table, [*placeholders(template), *needed], self.name, recipe.skip_bad)
        limit = context_length(recipe, tokenizer)
        labels = recipe.labels if isinstance(recipe.labels, dict) else {}
        names = list(labels)
        shared = None if multiple else [self._tokens(tokenizer, word) for word in labels.values()]
        result = Examples([], [], [], skipped=table.skipped)
        for number, row in enumerate(table.rows, 1):
            where = f"row {number} of '{table.source}'"
            prompt = fill_template(template, row, where)
            choices = shared
            if multiple:
                if not isinstance(row["choices"], list):
                    raise InputError(
                        f"{where}: 'choices' must be a list, not {row['choices']!r:.60}. CSV has no lists: use JSONL or Parquet"
                    )
                names = [str(choice) for choice in row["choices"]]
                if len(names) < 2:
                    raise InputError(f"{where} has {len(names)} choices; at least two are needed")
                choices = [self._tokens(tokenizer, name) for name in names]
            assert choices is not None
            try:
                answer = self._answer(row, names, multiple, where) if labelled else None
            except InputError:
                if not recipe.skip_bad:
                    raise
                result.skipped += 1
                continue
            ids = tokenizer(prompt)["input_ids"]
            ids, cut = fit(ids, max(map(len, choices)), limit, where)
            result.truncated += cut
            result.items.append(_Example(Item(ids, choices), names, answer))
            result.rows.append({**row, "_prompt": prompt})
            result.lengths.append(len(ids) + max(map(len, choices)) - 1)
        return result

    def _tokens(self, tokenizer: Any, words: str) -> list[int]:
        """Tokens of an answer as it follows a prompt that ends without a space."""
        if not words.strip():
            raise InputError(f"the choice {words!r} is empty; give it words")
        return tokenizer(" " + words.strip(), add_special_tokens=False)["input_ids"]

    def _answer(self, row: Row, names: list[str], multiple: bool, where: str) -> int:
        value = row["answer"] if multiple else row["label"]
        if multiple and isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < len(names):
                raise InputError(
                    f"{where}: answer {value} is not an index of its {len(names)} choices (0 is the first)"
                )
            return value
        return label_index(value, names, where)

    def trainer(
        self,
        model: Any,
        tokenizer: Any,
        train: Examples,
        evaluation: Examples,
        recipe: Recipe,
        directory: Path,
        show: Any = None,
    ) -> Trainer:
        from datasets import Dataset

        def dataset(examples: Examples, first: int) -> Dataset:
            indices = list(range(first, first + len(examples.items)))
            return Dataset.from_dict({"index": indices, "length": examples.lengths})

        return _ChoiceTrainer(
            model=model,
            args=arguments(recipe, directory, train.lengths, remove_unused_columns=False),
            train_dataset=dataset(train, 0),
            eval_dataset=dataset(evaluation, len(train.items)) if recipe.train.eval_every else None,
            data_collator=_Collator(train.items + evaluation.items, tokenizer.pad_token_id, recipe.length_normalise),
            recipe=recipe,
            run_directory=directory,
            show=show,
        )

    def predict(
        self,
        model: Any,
        tokenizer: Any,
        examples: Examples,
        recipe: Recipe,
        advance: Callable[[int], None] = lambda n: None,
        draws: Draws | None = None,
    ) -> list[Row]:
        def share(indices: list[int]) -> list[Row]:
            items = [examples.items[i].item for i in indices]
            count = draws.count if draws else 1
            with draws.of(model) if draws else nullcontext():
                scores = score_copies(model, items, tokenizer.pad_token_id, count, advance=advance)
            rows = []
            for index, *copies in zip(indices, *scores, strict=True):
                samples = [_probs(choices, recipe) for choices in copies]
                example, row = examples.items[index], examples.rows[index]
                head = {"id": row.get("id", str(index)), "text": row.get("text", row["_prompt"])}
                rows.append(head | describe_samples(samples, example.names, example.answer, draws))
            return rows

        return sharded(share, len(examples.items), model)

    def summarise(self, predictions: list[Row], seed: int = 0) -> Evaluation:
        return classification(self, predictions, seed)


def _probs(choices: list[Score], recipe: Recipe) -> np.ndarray:
    """Probabilities of the choices among themselves, (C,)."""
    values = np.array([c.logprobs.mean() if recipe.length_normalise else c.total for c in choices])
    probs = np.exp(values - values.max())
    return probs / probs.sum()


class _Collator:
    """Packs examples by index: all choices where each is one token, else the right answer alone."""

    def __init__(self, examples: list[_Example], pad_id: int, length_normalise: bool) -> None:
        self.examples = examples
        self.pad_id = pad_id
        self.restricted = all(len(c) == 1 for example in examples for c in example.item.choices)
        self.length_normalise = length_normalise

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = [self.examples[row["index"]] for row in rows]
        if self.restricted:
            answers = [example.answer for example in chosen]
            items = [example.item for example in chosen]
        else:
            answers = [0] * len(chosen)
            items = [Item(example.item.prompt, [example.item.choices[example.answer]]) for example in chosen]
        starts = np.cumsum([0, *(len(item.choices) for item in items[:-1])])
        packed = pack(items, self.pad_id)
        packed["right_choice"] = torch.as_tensor(starts + np.array(answers))
        packed["restricted"] = self.restricted
        packed["length_normalise"] = self.length_normalise
        return packed


def choice_losses(model: torch.nn.Module, packed: dict[str, Any]) -> torch.Tensor:
    """Loss of each example (B,): -log p(right answer), renormalised over the choices where they are all packed."""
    values = choice_logprobs(
        edge_logprobs(scored_logits(model, packed), packed), packed, length_normalise=packed["length_normalise"]
    )
    right = values[packed["right_choice"]]
    if not packed["restricted"]:
        return -right
    rows = packed["choice_row"]
    highest = torch.full((len(right),), -torch.inf, device=values.device).scatter_reduce(
        0, rows, values.detach(), "amax"
    )
    total = torch.zeros_like(right).index_add(0, rows, torch.exp(values - highest[rows]))
    return highest + torch.log(total) - right


class _ChoiceTrainer(ExampleMeanTrainer, Trainer):
    def example_losses(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return choice_losses(model, inputs)


TASK = Choice()
