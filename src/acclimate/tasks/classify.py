"""Classification with a head on an encoder or a language model, through transformers' Trainer.

Rows: `text` and `label`. The head is new, so the untouched model's score is chance; the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DataCollatorWithPadding, Trainer

from acclimate.arguments import arguments
from acclimate.data import Row, Table, require_columns
from acclimate.errors import InputError
from acclimate.models import trained_labels
from acclimate.recipe import Recipe
from acclimate.tasks.base import (
    Draws,
    Evaluation,
    Examples,
    Task,
    classification,
    context_length,
    describe_samples,
    label_index,
    labels_found,
    sharded,
)
from acclimate.training import ExampleMeanTrainer


class Classify(Task):
    name = "classify"
    averages = True
    auto_class = "AutoModelForSequenceClassification"
    peft_type = "SEQ_CLS"
    columns = ("text", "label")
    cut = "texts longer than the limit lost their end"

    def complete(self, recipe: Recipe, table: Table) -> Recipe:
        labels = list(recipe.labels if recipe.labels is not None else labels_found(table, recipe, self.name))
        own = trained_labels(recipe.model)
        if set(own) == set(labels):
            labels = own  # a head that was trained on these labels keeps their order, or its answers would be mixed up
        if len(labels) < 2:
            raise InputError(f"classification needs at least two labels; found {labels} in '{table.source}'")
        return recipe.replace(labels=labels)

    def model_options(self, recipe: Recipe) -> dict[str, Any]:
        names = list(recipe.labels or [])
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }

    def examples(self, table: Table, recipe: Recipe, tokenizer: Any, labelled: bool = True) -> Examples:
        table = require_columns(table, self.columns if labelled else ("text",), self.name, recipe.skip_bad)
        limit = context_length(recipe, tokenizer)
        names = list(recipe.labels or [])
        result = Examples([], [], [], skipped=table.skipped)
        for number, row in enumerate(table.rows, 1):
            if labelled and str(row["label"]) not in names and recipe.skip_bad:
                result.skipped += 1
                continue
            answer = (
                {"labels": label_index(row["label"], names, f"row {number} of '{table.source}'")} if labelled else {}
            )
            ids = tokenizer(str(row["text"]))["input_ids"]
            if len(ids) > limit:
                result.truncated += 1
                ids = tokenizer(str(row["text"]), truncation=True, max_length=limit)["input_ids"]
            result.items.append({"input_ids": ids} | answer)
            result.rows.append(row)
            result.lengths.append(len(ids))
        return result

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

        return _ClassifyTrainer(
            model=model,
            args=arguments(recipe, directory, train.lengths),
            train_dataset=Dataset.from_list(train.items),
            eval_dataset=Dataset.from_list(evaluation.items) if recipe.train.eval_every else None,
            data_collator=DataCollatorWithPadding(tokenizer),
            recipe=recipe,
            run_directory=directory,
            show=show,
        )

    @torch.no_grad()
    def predict(
        self,
        model: Any,
        tokenizer: Any,
        examples: Examples,
        recipe: Recipe,
        advance: Callable[[int], None] = lambda n: None,
        draws: Draws | None = None,
    ) -> list[Row]:
        names = list(recipe.labels or [])
        device = next(model.parameters()).device

        def share(indices: list[int]) -> list[Row]:
            order = sorted(range(len(indices)), key=lambda k: -examples.lengths[indices[k]])
            rows: list[Row] = [{} for _ in indices]
            for start in range(0, len(order), 32):
                batch = order[start : start + 32]
                ids = [{"input_ids": examples.items[indices[k]]["input_ids"]} for k in batch]
                inputs = tokenizer.pad(ids, return_tensors="pt").to(device)
                probs = torch.softmax(model(**inputs).logits.double(), dim=-1).unflatten(0, (-1, len(batch)))
                for k, samples in zip(batch, probs.transpose(0, 1).cpu().numpy(), strict=True):
                    item, row = examples.items[indices[k]], examples.rows[indices[k]]
                    head = {"id": row.get("id", str(indices[k])), "text": row["text"]}
                    rows[k] = head | describe_samples(samples, names, item.get("labels"), draws)
                advance(len(batch))
            return rows

        training = model.training
        model.eval()
        try:
            with draws.of(model) if draws else nullcontext():
                return sharded(share, len(examples.items), model)
        finally:
            model.train(training)

    def summarise(self, predictions: list[Row], seed: int = 0) -> Evaluation:
        return classification(self, predictions, seed)


class _ClassifyTrainer(ExampleMeanTrainer, Trainer):
    def example_losses(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        labels = inputs["labels"]
        logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return F.cross_entropy(logits.float(), labels, reduction="none")


TASK = Classify()
