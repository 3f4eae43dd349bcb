"""Direct preference optimisation on prompt, chosen, rejected rows, through TRL's DPOTrainer.

The reference is the model as training found it: TRL keeps a copy of the adapter's start, or of all weights under full fine-tuning.
A pair counts as correct when the model gives the chosen answer the higher log-probability per token (answers differ in
length); that needs no reference, so it can be measured before tuning too. margin = log p(chosen) - log p(rejected), in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from trl import DPOConfig, DPOTrainer

from acclimate.arguments import arguments
from acclimate.data import Row, Table, require_columns
from acclimate.metrics import bootstrap_interval
from acclimate.models import quiet
from acclimate.recipe import Recipe
from acclimate.scoring import Item, score
from acclimate.tasks.base import (
    Draws,
    Evaluation,
    Examples,
    Task,
    check_text,
    context_length,
    fit,
    sharded,
    tokenise_pair,
    tokenise_prompt,
)
from acclimate.tasks.sft import as_text
from acclimate.training import RunTrainer

DEFINITION = (
    "accuracy: share of pairs in which the model gives the chosen answer the higher log-probability per token; margin: "
    "log p(chosen) - log p(rejected) in nats; nll: mean of -ln p over the chosen answer's tokens."
)


class DPO(Task):
    name = "dpo"
    columns = ("prompt", "chosen", "rejected")

    def examples(self, table: Table, recipe: Recipe, tokenizer: Any, labelled: bool = True) -> Examples:
        table = require_columns(table, self.columns if labelled else ("prompt",), self.name, recipe.skip_bad)
        limit = context_length(recipe, tokenizer)
        result = Examples([], [], [], skipped=table.skipped)
        for number, row in enumerate(table.rows, 1):
            where = f"row {number} of '{table.source}'"
            check_text(row, self.columns if labelled else ["prompt"], where)
            prompt = tokenise_prompt(tokenizer, row["prompt"], where)
            answers = []
            if labelled:
                pairs = [tokenise_pair(tokenizer, row["prompt"], row[side], where) for side in ("chosen", "rejected")]
                prompt, answers = pairs[0][0], [answer for _, answer in pairs]
            ids, cut = fit(prompt, max(map(len, answers), default=0), limit, where)
            result.truncated += cut
            result.items.append(Item(ids, answers))
            result.rows.append({**row, "_prompt": as_text(row["prompt"])})
            result.lengths.append(2 * len(ids) + sum(map(len, answers)))
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
    ) -> DPOTrainer:
        from datasets import Dataset

        def dataset(examples: Examples) -> Dataset:
            return Dataset.from_dict(
                {
                    "prompt_ids": [list(item.prompt) for item in examples.items],
                    "chosen_ids": [list(item.choices[0]) for item in examples.items],
                    "rejected_ids": [list(item.choices[1]) for item in examples.items],
                }
            )

        with quiet():  # TRL loads its own copy of a fully trained model as the reference
            return _DPOTrainer(
                model=model,
                args=arguments(recipe, directory, train.lengths, kind=DPOConfig, max_length=None, beta=recipe.dpo_beta),
                train_dataset=dataset(train),
                eval_dataset=dataset(evaluation) if recipe.train.eval_every else None,
                processing_class=tokenizer,
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
            scores = score(model, [examples.items[i] for i in indices], tokenizer.pad_token_id, advance=advance)
            rows = []
            for index, (chosen, rejected) in zip(indices, scores, strict=True):
                row = examples.rows[index]
                rows.append(
                    {
                        "id": row.get("id", str(index)),
                        "prompt": row["_prompt"],
                        "margin": chosen.total - rejected.total,
                        "correct": bool(chosen.logprobs.mean() > rejected.logprobs.mean()),
                        "nll": -float(chosen.logprobs.mean()),
                        "tokens": len(chosen.logprobs),
                        "_chosen": chosen.logprobs,
                    }
                )
            return rows

        return sharded(share, len(examples.items), model)

    def summarise(self, predictions: list[Row], seed: int = 0) -> Evaluation:
        def mean(values: np.ndarray) -> float:
            return float(values.mean())

        def ratio(values: np.ndarray, weights: np.ndarray) -> float:
            return float(values.sum() / weights.sum())

        nll = np.array([-row["_chosen"].sum() for row in predictions])
        tokens = np.array([float(len(row["_chosen"])) for row in predictions])
        columns = {name: np.array([float(row[name]) for row in predictions]) for name in ("correct", "margin")}
        metrics = {
            "accuracy": bootstrap_interval(mean, columns["correct"], seed=seed).to_dict(),
            "margin": bootstrap_interval(mean, columns["margin"], seed=seed).to_dict(),
            "nll": bootstrap_interval(ratio, nll, tokens, seed=seed).to_dict(),
            "perplexity": bootstrap_interval(lambda v, w: float(np.exp(ratio(v, w))), nll, tokens, seed=seed).to_dict(),
        }
        return Evaluation(
            task=self.name,
            metric=self.metric,
            higher_is_better=True,
            metrics=metrics,
            predictions=[{k: v for k, v in row.items() if not k.startswith("_")} for row in predictions],
            definition=DEFINITION,
        )


class _DPOTrainer(RunTrainer, DPOTrainer):
    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # tokenised already, so that training and evaluation agree and answers stay whole

    def summed_loss(self, model: Any, batch: Any) -> Any:
        return self.compute_loss(model, self._prepare_inputs(batch)) * (len(batch["input_ids"]) // 2)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A run has its report; TRL's card would be written into the checkpoints."""


TASK = DPO()
