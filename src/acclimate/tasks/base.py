"""What a task is: how rows become token ids, which trainer learns from them, and how the result is scored.

Scale: scoring is sharded over the processes of `accelerate launch`; every rank gets all rows back.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acclimate.data import Row, Table, require_columns
from acclimate.errors import InputError, did_you_mean
from acclimate.metrics import (
    DEFINITION,
    HIGHER_IS_BETTER,
    bootstrap_interval,
    in_words,
    paired_difference,
    reliability_table,
    summarise,
    uncertainty_parts,
    verdict,
)
from acclimate.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

DEFAULT_MAX_LENGTH = 1024


@dataclass
class Examples:
    """Rows ready for a model: task-specific items, their lengths in tokens, and what had to be cut or left out."""

    items: list[Any]
    rows: list[Row]
    lengths: list[int]
    truncated: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Draws:
    """How many draws of an adapter's weights a prediction averages over; the same seed makes the same draws."""

    count: int
    seed: int

    def of(self, model: Any) -> AbstractContextManager[None]:
        """Inside, the model answers every batch `count` times, one block of rows a draw."""
        import torch

        return model.base_model.posterior_samples(self.count, torch.Generator().manual_seed(self.seed))


@dataclass
class Evaluation:
    """Scores of one model on one set of rows. `predictions` has one row per example, in their order."""

    task: str
    metric: str
    higher_is_better: bool
    metrics: dict[str, dict[str, Any]]
    predictions: list[Row] = field(repr=False)
    definition: str = ""
    reliability: list[Row] | None = None
    per_class: list[Row] | None = None
    classes: list[str] | None = None
    seconds: float = 0.0
    truncated: int = 0
    draws: int | None = None
    sampled: Evaluation | None = None

    def __getitem__(self, metric: str) -> float:
        return self.metrics[metric]["value"]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the predictions (they have their own file)."""
        names = ("metrics", "reliability", "classes", "per_class", "definition", "seconds", "truncated")
        content = {name: getattr(self, name) for name in names} | {"n": len(self.predictions)}
        if self.draws is not None:
            content["draws"] = self.draws
        return content | ({"sampled": self.sampled.to_dict()} if self.sampled else {})


class Task(ABC):
    """Base class. One instance a task, without state: everything it needs comes in as arguments."""

    name: str
    auto_class = "AutoModelForCausalLM"
    peft_type = "CAUSAL_LM"
    metric = "accuracy"
    higher_is_better = True
    averages = False  # whether predictions can be averaged over draws of an adapter's weights
    columns: tuple[str, ...] = ()
    cut = "prompts longer than the limit lost their beginning (answers are whole)"

    def complete(self, recipe: Recipe, table: Table) -> Recipe:
        """Fill in what the training data tells (the label set, say)."""
        return recipe

    def model_options(self, recipe: Recipe) -> dict[str, Any]:
        """Extra arguments of `from_pretrained`."""
        return {}

    def content(self, recipe: Recipe) -> tuple[str, ...]:
        """The columns that make a row what it is; rows that agree in them are the same example."""
        return self.columns

    @abstractmethod
    def examples(
        self, table: Table, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, labelled: bool = True
    ) -> Examples:
        """Rows as token ids; without `labelled`, the answers need not be there."""

    @abstractmethod
    def trainer(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        train: Examples,
        evaluation: Examples,
        recipe: Recipe,
        directory: Path,
        show: Any = None,
    ) -> Trainer:
        """The trainer that learns from `train`; it is a `RunTrainer` too."""

    @abstractmethod
    def predict(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        recipe: Recipe,
        advance: Callable[[int], None] = lambda count: None,
        draws: Draws | None = None,
    ) -> list[Row]:
        """One row an example, with what was predicted and, where the answer is known, how well.

        With `draws`, only for tasks with `averages`: by the mean of the probabilities over draws of the weights; rows also say how
        unsure that is, and why.
        """

    @abstractmethod
    def summarise(self, predictions: list[Row], seed: int = 0) -> Evaluation:
        """Metrics with bootstrap intervals from the rows of `predict`."""


def context_length(recipe: Recipe, model_or_tokenizer: Any) -> int:
    """Tokens an example may have: the recipe's, else what the model takes, at most 1,024."""
    limit = getattr(getattr(model_or_tokenizer, "config", None), "max_position_embeddings", None)
    limit = limit or getattr(model_or_tokenizer, "model_max_length", None) or DEFAULT_MAX_LENGTH
    if recipe.max_length is None:
        return min(limit, DEFAULT_MAX_LENGTH)
    if recipe.max_length > limit:
        raise InputError(f"max_length {recipe.max_length} is more than the model's context of {limit} tokens")
    return recipe.max_length


def fit(prompt: list[int], answer_length: int, limit: int, where: str) -> tuple[list[int], bool]:
    """Cut the START of a prompt so that prompt and answer fit; the answer is never cut."""
    room = limit - answer_length
    if room < 1:
        raise InputError(
            f"the answer of {where} has {answer_length} tokens, more than the limit of {limit}. Answers are never cut: "
            "raise max_length, or shorten the row"
        )
    return (prompt[-room:], True) if len(prompt) > room else (prompt, False)


def placeholders(template: str) -> list[str]:
    """The columns that a template takes, in order."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InputError(
            f"template {template!r} cannot be read: {error}. Write {{{{ and }}}} for literal braces"
        ) from None
    if not names:
        raise InputError(f"template {template!r} has no {{column}} placeholder")
    return list(dict.fromkeys(names))


def fill_template(template: str, row: Row, where: str) -> str:
    """The template with a row's columns in its {placeholders}."""
    try:
        return template.format_map(row)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where} does not fit the template {template!r}: {error}") from None


def is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)


def check_text(row: Row, columns: Sequence[str], where: str) -> None:
    """These columns must hold text or a chat."""
    for column in columns:
        if not isinstance(row[column], str) and not is_chat(row[column]):
            raise InputError(
                f'{where}: \'{column}\' must be text or a list of {{"role": ..., "content": ...}}, not {row[column]!r:.60}'
            )


def tokenise_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Any, where: str) -> list[int]:
    """Token ids of text as it stands, or of messages up to where the answer begins."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return _render(tokenizer, prompt, where, add_generation_prompt=True)


def tokenise_pair(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, completion: Any, where: str
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of what should follow it, end token included.

    Text is tokenised as it stands, the two sides apart. Lists of messages go through the model's chat template; the
    completion then starts where the two renderings part.
    """
    start = tokenise_prompt(tokenizer, prompt, where)
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise InputError(f"{where}: the prompt is text but the answer is a list of messages; give both in one form")
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if ids[-1:] != [tokenizer.eos_token_id] else []
        return start, ids + end
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    whole = _render(tokenizer, [*prompt, *completion], where)
    shared = next(
        (i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), min(len(start), len(whole))
    )
    return whole[:shared], whole[shared:]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Row], where: str, **options: Any) -> list[int]:
    import jinja2

    if tokenizer.chat_template is None:
        raise InputError(
            f"{where}: these are chat messages, but this model has no chat template. Use prompt and completion text"
        )
    try:
        ids: Any = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return ids
    except jinja2.TemplateError as error:
        raise InputError(f"{where}: the model's chat template refuses these messages: {error}") from None


def sharded(function: Callable[[list[int]], list[Row]], count: int, model: Any) -> list[Row]:
    """Run `function` on this process's share of the indices 0..count-1 and gather the rows of all, in order.

    A model that FSDP has sharded needs every rank in every forward pass: then each rank scores all rows, in step.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from torch.distributed.fsdp import FSDPModule

    state = PartialState()
    if state.num_processes == 1 or any(isinstance(module, FSDPModule) for module in model.modules()):
        return function(list(range(count)))
    mine = list(range(state.process_index, count, state.num_processes))
    gathered = gather_object(list(zip(mine, function(mine), strict=True)))
    return [row for _, row in sorted(gathered, key=lambda pair: pair[0])]


def classification(task: Task, predictions: list[Row], seed: int) -> Evaluation:
    """Evaluation of rows that carry `probs` (a list per row, of any length), `label` and `answer` (its index)."""
    width = max(len(row["_probs"]) for row in predictions)
    probs = np.zeros((len(predictions), width))
    for index, row in enumerate(predictions):
        probs[index, : len(row["_probs"])] = row["_probs"]
    answers = np.array([row["_answer"] for row in predictions])
    classes = sorted({row["label"] for row in predictions})
    per_class = None
    if len(classes) <= 200 and len(classes) < len(predictions):
        grouped: Mapping[str, list[bool]] = {name: [] for name in classes}
        for row in predictions:
            grouped[row["label"]].append(row["correct"])
        per_class = [{"class": k, "n": len(v), "accuracy": float(np.mean(v))} for k, v in grouped.items()]
    metrics = summarise(probs, answers, seed=seed)
    for name in ("epistemic", "aleatoric"):
        if name in predictions[0]:
            metrics[name] = bootstrap_interval(np.mean, [row[name] for row in predictions], seed=seed).to_dict()
    return Evaluation(
        task=task.name,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        metrics=metrics,
        predictions=[{k: v for k, v in row.items() if not k.startswith("_")} for row in predictions],
        definition=DEFINITION,
        reliability=reliability_table(probs, answers),
        per_class=per_class,
        classes=classes if per_class else None,
    )


def describe(probs: Any, names: Sequence[str], answer: int | None) -> Row:
    """The part of a prediction row that all classifiers share; private keys carry what metrics need in full."""
    values = np.asarray(probs, dtype=float)
    best = int(values.argmax())
    shown = np.argsort(-values)[:20]
    row: Row = {
        "prediction": names[best],
        "confidence": float(values[best]),
        "probs": {names[i]: round(float(values[i]), 6) for i in shown},
        "_probs": values.tolist(),
    }
    if answer is not None:
        row |= {
            "label": names[answer],
            "correct": best == answer,
            "nll": float(-np.log(max(values[answer], 1e-12))),
            "_answer": answer,
        }
    return row


def describe_samples(samples: Any, names: Sequence[str], answer: int | None, draws: Draws | None) -> Row:
    """`describe` of the mean of samples (S, C); where these are draws, with their `total`, `aleatoric` and `epistemic` uncertainty
    in nats."""
    values = np.asarray(samples, dtype=float)
    row = describe(values.mean(axis=0), names, answer)
    if draws is None:
        return row
    return row | {name: float(part[0]) for name, part in uncertainty_parts(values[:, None]).items()}


def label_index(value: Any, names: Sequence[str], where: str) -> int:
    """Position of a label in the label set, or an error that names it and the closest one."""
    if str(value) in names:
        return list(names).index(str(value))
    known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    raise InputError(
        f"{where}: label '{value}' is not in the label set.{did_you_mean(str(value), names)} Labels: {known}"
    )


def labels_found(table: Table, recipe: Recipe, task: str) -> list[str]:
    """The label set of a training table, sorted. More than a thousand labels is taken for a wrong column."""
    require_columns(table, ["label"], task, recipe.skip_bad)
    labels = sorted({str(row["label"]) for row in table.rows if row.get("label") not in (None, "")})
    if len(labels) > 1000:
        raise InputError(
            f"column 'label' of '{table.source}' has {len(labels)} different values: is it the right column?"
        )
    return labels


def row_scores(rows: list[Row]) -> dict[str, np.ndarray]:
    """Per-row scores whose mean is the metric, from prediction rows as they stand on disk.

    Token-level metrics weigh a row by its tokens: w_i = tokens_i / mean(tokens).
    """
    scores = {}
    weights = np.ones(len(rows))
    if "tokens" in rows[0]:
        tokens = np.array([row["tokens"] for row in rows], dtype=float)
        weights = tokens / tokens.mean()
    if "correct" in rows[0]:
        scores["accuracy"] = np.array([float(row["correct"]) for row in rows])
    elif "token_accuracy" in rows[0]:
        scores["accuracy"] = np.array([row["token_accuracy"] for row in rows]) * weights
    scores["nll"] = np.array([row["nll"] for row in rows]) * weights
    return scores


def differences(after: list[Row], before: list[Row], names: tuple[str, str] = ("tuned", "untouched")) -> dict[str, Any]:
    """Paired differences after - before of every per-row metric, with verdicts in words. Rows are matched by id."""
    by_id = {row["id"]: row for row in before}
    first = row_scores(after)
    second = row_scores([by_id[row["id"]] for row in after])
    result = {}
    for metric in first:
        difference = paired_difference(first[metric], second[metric])
        higher = HIGHER_IS_BETTER[metric]
        result[metric] = difference.to_dict() | {
            "verdict": verdict(difference, higher),
            "words": in_words(*names, metric, difference, higher),
        }
    return result
