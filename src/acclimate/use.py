"""What one does with a model or a run: score it, ask it, take it elsewhere."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from acclimate import data, models, runs
from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.prepare import load_for, load_run, load_tables, load_tuned, with_own_adapter, with_sample_defaults
from acclimate.recipe import Recipe, nest
from acclimate.show import Silent
from acclimate.tasks import Task, get_task
from acclimate.tasks.base import Draws, Evaluation, Examples


def measure(
    task: Task,
    model: Any,
    tokenizer: Any,
    examples: Examples,
    recipe: Recipe,
    show: Any,
    what: str,
    samples: int | None = None,
) -> Evaluation:
    """Score a model on examples, with a progress bar and the time it took.

    Where the adapter has a posterior, `evaluation.sampled` is the score of predictions averaged over `samples` draws of it
    (None: 8), beside that of its mean.
    """
    draws = posterior_draws(model, task, recipe, samples)
    start = time.perf_counter()
    show.start(what, total=len(examples.items))
    predictions = task.predict(model, tokenizer, examples, recipe, show.advance)
    show.stop()
    evaluation = task.summarise(predictions, recipe.seed)
    evaluation.seconds = round(time.perf_counter() - start, 3)
    evaluation.truncated = examples.truncated
    if draws is not None:
        start = time.perf_counter()
        show.start(f"{what}, {draws.count} draws", total=len(examples.items))
        predictions = task.predict(model, tokenizer, examples, recipe, show.advance, draws)
        show.stop()
        evaluation.sampled = task.summarise(predictions, recipe.seed)
        evaluation.sampled.seconds = round(time.perf_counter() - start, 3)
        evaluation.sampled.draws = draws.count
        for row, sampled in zip(evaluation.predictions, predictions, strict=True):
            row["sampled"] = {name: sampled[name] for name in ("prediction", "confidence", "epistemic")}
    return evaluation


DEFAULT_SAMPLES = 8


def posterior_draws(model: Any, task: Task, recipe: Recipe, samples: int | None) -> Draws | None:
    """Draws to average over: `samples`, or the usual number where the adapter has a posterior and the task can use it.

    Raises InputError when `samples` was asked for and cannot be had.
    """
    has_posterior = hasattr(getattr(model, "base_model", None), "posterior_samples")
    if samples is None:
        return Draws(DEFAULT_SAMPLES, recipe.seed) if has_posterior and task.averages else None
    if samples < 1:
        raise InputError(f"--samples is a number of draws, at least 1, not {samples}")
    if not has_posterior:
        raise InputError(
            f"--samples draws from the posterior of an adapter, and '{recipe.adapter}' has none. Train with "
            "--adapter bayesian-lora, or leave --samples out"
        )
    if not task.averages:
        raise InputError(
            f"predictions are averaged over draws for the tasks choice and classify; this run's task is {task.name}, "
            "which answers from the mean of the posterior. Leave --samples out"
        )
    return Draws(samples, recipe.seed)


def rows_to_score(
    model: str | Path, data_source: str | None, settings: Mapping[str, Any]
) -> tuple[Recipe, Task, Table]:
    """The recipe (labels, template, ...), task and rows by which `evaluate` scores a model or a run. Arguments as there."""
    is_run = (Path(model) / "run.json").exists()
    if is_run:
        recipe = Recipe.from_yaml(Path(model) / "recipe.yaml")
        if data_source is not None:  # other rows than the run's: all of them, unless a number is asked for
            recipe = recipe.replace(max_eval_samples=None)
        recipe = recipe.replace(**settings)
        source = data_source or recipe.eval_data
    else:
        if data_source is None:
            raise InputError("name the rows to score with --data")
        source = data_source
        recipe = with_sample_defaults(Recipe(**nest({"model": str(model), "data": source, **settings})))
        source = recipe.eval_data or source
    task = get_task(recipe.task or "choice")
    if source is None:  # the run held out a part of its training rows
        table = load_tables(recipe)[1]
    else:
        table = data.read_table(source, split="test", skip_bad=recipe.skip_bad)
        table = data.with_ids(data.rename_columns(table, recipe.columns))
    return recipe if is_run else task.complete(recipe, table), task, table


def evaluate(
    model: str | Path,
    data_source: str | None = None,
    *,
    adapter: str | Path | None = None,
    directory: str | Path | None = None,
    samples: int | None = None,
    show: Any = None,
    **settings: Any,
) -> Evaluation:
    """Score a run, a model, or a model with an adapter, on data.

    >>> evaluation = evaluate("smollm2", "clinc150", max_eval_samples=8)
    >>> len(evaluation.predictions), 0 <= evaluation["accuracy"] <= 1
    (8, True)

    Parameters
    ----------
    model
        A run directory, or whatever `load_model` takes.
    data_source
        Rows as for `tune`; None: the evaluation rows of the run.
    adapter
        A PEFT adapter directory to put on the model.
    directory
        Where to write evaluation.json, predictions.jsonl and report.html; None: nowhere.
    samples
        Draws of a Bayesian adapter's weights that `evaluation.sampled` averages over; None: 8 where there is a posterior.
    settings
        Recipe fields (`task`, `labels`, `template`, ...) over those of the run.

    Returns
    -------
    Evaluation
        `evaluation["accuracy"]` is the value of a metric, `evaluation.metrics` has the intervals.
    """
    from acclimate.report import write_report

    show = show or Silent()
    is_run = (Path(model) / "run.json").exists()
    if is_run and adapter is not None:
        raise InputError(f"'{model}' is a run and has its own adapter; give the base model with --adapter")
    recipe, task, table = rows_to_score(model, data_source, settings)
    if directory is not None and any(Path(directory).glob("*")):
        raise InputError(f"'{directory}' is not empty. Choose another place with -o")
    if is_run:
        loaded, tokenizer, task, _ = load_run(model, show)
    else:
        loaded, tokenizer = load_for(task, recipe, show)
        if adapter is not None:
            loaded = load_tuned(loaded, recipe.replace(adapter="lora"), Path(adapter))
        else:
            loaded = with_own_adapter(loaded, recipe)
    examples = task.examples(data.sample(table, recipe.max_eval_samples, recipe.data_seed + 1), recipe, tokenizer)
    if not examples.items:
        raise InputError(f"no usable rows in '{table.source}'")
    what = f"scoring {len(examples.items)} rows"
    evaluation = measure(task, loaded, tokenizer, examples, recipe, show, what, samples)
    if directory is not None:
        path = Path(directory)
        runs.write_jsonl(path / "predictions.jsonl", evaluation.predictions)
        runs.write_json(path / "evaluation.json", {"task": task.name, "before": None, "after": evaluation.to_dict()})
        write_report(path)
    return evaluation


def predict(
    run: str | Path,
    rows: Iterable[data.Row],
    *,
    batch_size: int = 64,
    samples: int | None = None,
    show: Any = None,
) -> Iterator[data.Row]:
    """Answer rows with a run's model, in order, a batch at a time, so that a stream of any length fits.

    Yields one row each: `prediction`, `confidence` and `probs` for choice and classify; `completion` for sft and dpo.
    Rows need the run's input columns (`text`, say); answers are not looked at. With `samples`, a run with a Bayesian adapter
    answers by the mean over that many draws of its weights, and adds `epistemic`, `aleatoric` and `total` uncertainty in nats.
    Raises InputError for a row without the columns, and for `samples` where there is nothing to draw.
    """
    loaded = load_run(run, show)
    model, _, task, recipe = loaded
    draws = posterior_draws(model, task, recipe, samples) if samples is not None else None
    stream, done = iter(rows), 0
    while batch := list(itertools.islice(stream, batch_size)):
        yield from answer_rows(*loaded, batch, f"input after row {done}" if done else "input", draws)
        done += len(batch)


def answer_rows(
    model: Any,
    tokenizer: Any,
    task: Task,
    recipe: Recipe,
    rows: list[data.Row],
    source: str = "input",
    draws: Draws | None = None,
) -> Iterator[data.Row]:
    """Answers to one batch of rows by what `load_run` returned; messages call the batch `source`."""
    from acclimate.generate import complete_prompts

    inputs = {recipe.columns[name]: name for name in recipe.columns}
    table = Table([{inputs.get(k, k): v for k, v in row.items()} for row in rows], source)
    examples = task.examples(table, recipe.replace(skip_bad=False), tokenizer, labelled=False)
    if task.name in ("sft", "dpo"):
        answers = [
            {"completion": text}
            for text in complete_prompts(model, tokenizer, [list(i.prompt) for i in examples.items])
        ]
    else:
        answers = task.predict(model, tokenizer, examples, recipe, draws=draws)
    for row, answer in zip(rows, answers, strict=True):
        yield row | {
            key: value for key, value in answer.items() if not key.startswith("_") and key not in ("id", "text")
        }


def export(run: str | Path, to: str, directory: str | Path, show: Any = None, *, samples: int | None = None) -> Path:
    """Write a run's result for use elsewhere: `peft` (the adapter folder), `merged` (a whole model, adapter folded in), or
    `lora`: the posterior mean of a Bayesian adapter as a plain LoRA, or `samples` draws of it as folders sample-0, sample-1, ...
    """
    path, directory = Path(run), Path(directory)
    if to not in ("peft", "merged", "lora"):
        raise InputError(f"--to is peft, merged or lora, not '{to}'")
    if samples is not None and to != "lora":
        raise InputError("--samples writes draws of a Bayesian adapter as plain LoRA folders; it needs --to lora")
    if samples is not None and samples < 1:
        raise InputError(f"--samples is a number of draws, at least 1, not {samples}")
    if directory.exists():
        raise InputError(f"'{directory}' exists already. Choose another place with -o")
    if to == "peft":
        if not (path / "adapter").is_dir():
            raise InputError(
                f"run '{path}' has no adapter to export (was all of the model trained? then use --to merged)"
            )
        with runs.replacing(directory) as temporary:
            shutil.copytree(path / "adapter", temporary)
        return directory
    model, tokenizer, _, recipe = load_run(path, show)
    if to == "lora":
        _export_lora(model, recipe, directory, samples)
        return directory
    if _is_packed(model):  # by `acclimate quantize`: the sum is on no grid, so it becomes dense
        from acclimate.compress import dequantize_and_merge

        model = dequantize_and_merge(model)
    elif hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload(safe_merge=True)
    with models.quiet(), runs.replacing(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return directory


def _is_packed(model: Any) -> bool:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return getattr(config, "quant_method", None) == "acclimate_projq"


def _export_lora(model: Any, recipe: Recipe, directory: Path, samples: int | None) -> None:
    import torch

    if not hasattr(getattr(model, "base_model", None), "posterior_samples"):
        raise InputError(
            f"--to lora writes the posterior of a Bayesian adapter as plain LoRAs; this run's adapter is '{recipe.adapter}'. "
            "A LoRA is written by --to peft, anything else by --to merged"
        )
    from acclimate.adapters.bayesian_lora.export import export_mean, export_samples

    with models.quiet(), runs.replacing(directory) as temporary:
        if samples is None:
            export_mean(model, temporary)
        else:
            export_samples(model, temporary, samples, generator=torch.Generator().manual_seed(recipe.seed))
