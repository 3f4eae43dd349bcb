"""Supervised fine-tuning on completions, through TRL's SFTTrainer.

Rows: `prompt` and `completion` (text or lists of messages), or `messages` (a chat: every assistant turn becomes an example,
with the turns before it as the prompt). The loss and the scores are those of the completion's tokens; TRL computes logits only
there. Rows are tokenised here, once, so that training and evaluation see the same tokens and nothing cuts an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from trl import SFTConfig, SFTTrainer

from acclimate.arguments import arguments
from acclimate.data import Row, Table, require_columns
from acclimate.errors import InputError
from acclimate.metrics import adaptive_ece_of, bootstrap_interval, ece_of, reliability_bins
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
    is_chat,
    sharded,
    tokenise_pair,
    tokenise_prompt,
)
from acclimate.training import RunTrainer

DEFINITION = (
    "Over the completion's tokens, end token included: nll is the mean of -ln p(token); accuracy the share of tokens that are "
    "the most probable one; ece 15 equal-width bins of that probability; brier the mean of sum_v (p_v - 1[v=token])^2. "
    "Intervals resample rows, since the tokens of one row are not independent."
)


class SFT(Task):
    name = "sft"
    metric = "nll"
    higher_is_better = False

    def content(self, recipe: Recipe) -> tuple[str, ...]:
        return ("prompt", "completion", "messages")

    def examples(self, table: Table, recipe: Recipe, tokenizer: Any, labelled: bool = True) -> Examples:
        chat = "messages" in table.columns
        needed = ["messages"] if chat else ["prompt", *(["completion"] if labelled else [])]
        table = require_columns(table, needed, self.name, recipe.skip_bad)
        limit = context_length(recipe, tokenizer)
        result = Examples([], [], [], skipped=table.skipped)
        for number, row in enumerate(table.rows, 1):
            where = f"row {number} of '{table.source}'"
            try:
                turns = self._turns(row, chat, where, labelled)
            except InputError:
                if not recipe.skip_bad:
                    raise
                result.skipped += 1
                continue
            for turn, (prompt, completion) in enumerate(turns, 1):
                ids, answer = (
                    tokenise_pair(tokenizer, prompt, completion, where)
                    if labelled
                    else (tokenise_prompt(tokenizer, prompt, where), [])
                )
                ids, cut = fit(ids, len(answer), limit, where)
                result.truncated += cut
                result.items.append(Item(ids, [answer]))
                text = (
                    completion
                    if isinstance(completion, str)
                    else (completion[0].get("content") if completion else None)
                )
                name = row.get("id", str(number - 1))
                result.rows.append(
                    {
                        **row,
                        "id": name if len(turns) == 1 else f"{name}/{turn}",
                        "_prompt": as_text(prompt),
                        "_completion": text,
                    }
                )
                result.lengths.append(len(ids) + len(answer))
        return result

    def _turns(self, row: Row, chat: bool, where: str, labelled: bool) -> list[tuple[Any, Any]]:
        if not chat:
            check_text(row, ["prompt", *(["completion"] if labelled else [])], where)
            return [(row["prompt"], row.get("completion"))]
        messages = row["messages"]
        if not is_chat(messages):
            raise InputError(f'{where}: \'messages\' must be a list of {{"role": ..., "content": ...}}')
        if not labelled:  # a chat that ends with an answer asks for that answer
            return [(messages[:-1] if len(messages) > 1 and messages[-1]["role"] == "assistant" else messages, None)]
        turns = [(messages[:i], [m]) for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0]
        if not turns:
            raise InputError(f"{where}: 'messages' has no assistant turn to learn from")
        return turns

    def trainer(
        self,
        model: Any,
        tokenizer: Any,
        train: Examples,
        evaluation: Examples,
        recipe: Recipe,
        directory: Path,
        show: Any = None,
    ) -> SFTTrainer:
        from datasets import Dataset

        def dataset(examples: Examples) -> Dataset:
            return Dataset.from_dict(
                {
                    "input_ids": [[*item.prompt, *item.choices[0]] for item in examples.items],
                    "labels": [[-100] * len(item.prompt) + list(item.choices[0]) for item in examples.items],
                }
            )

        return _SFTTrainer(
            model=model,
            args=arguments(
                recipe, directory, train.lengths, kind=SFTConfig, max_length=None, activation_offloading=False
            ),
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
            items = [examples.items[i] for i in indices]
            scores = score(model, items, tokenizer.pad_token_id, details=True, advance=advance)
            rows = []
            for index, (one,) in zip(indices, scores, strict=True):
                row = examples.rows[index]
                assert one.correct is not None
                rows.append(
                    {
                        "id": row.get("id", str(index)),
                        "text": row["_prompt"],
                        "label": row["_completion"],
                        "nll": -float(one.logprobs.mean()),
                        "tokens": len(one.logprobs),
                        "token_accuracy": float(one.correct.mean()),
                        "_score": one,
                    }
                )
            return rows

        return sharded(share, len(examples.items), model)

    def summarise(self, predictions: list[Row], seed: int = 0) -> Evaluation:
        scores = [row["_score"] for row in predictions]
        counts = np.array([len(s.logprobs) for s in scores], dtype=float)
        nll = np.array([-s.total for s in scores])
        correct = np.array([s.correct.sum() for s in scores], dtype=float)
        brier = np.array([(s.squared - 2 * np.exp(s.logprobs) + 1).sum() for s in scores])

        def ratio(values: np.ndarray, weights: np.ndarray) -> float:
            return float(values.sum() / weights.sum())

        metrics = {
            "nll": bootstrap_interval(ratio, nll, counts, seed=seed).to_dict(),
            "perplexity": bootstrap_interval(lambda v, w: float(np.exp(ratio(v, w))), nll, counts, seed=seed).to_dict(),
            "accuracy": bootstrap_interval(ratio, correct, counts, seed=seed).to_dict(),
            "brier": bootstrap_interval(ratio, brier, counts, seed=seed).to_dict(),
        }
        confidence = np.concatenate([s.confidence for s in scores])
        right = np.concatenate([s.correct for s in scores])
        for name, function in (("ece", ece_of), ("adaptive_ece", adaptive_ece_of)):
            metrics[name] = {
                "value": function(confidence, right),
                "low": None,
                "high": None,
                "level": None,
                "n": len(right),
            }
        return Evaluation(
            task=self.name,
            metric=self.metric,
            higher_is_better=False,
            metrics=metrics,
            predictions=[{k: v for k, v in row.items() if not k.startswith("_")} for row in predictions],
            definition=DEFINITION,
            reliability=reliability_bins(confidence, right),
        )


def as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


class _SFTTrainer(RunTrainer, SFTTrainer):
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A run has its report; TRL's card would be written into the checkpoints."""


TASK = SFT()
