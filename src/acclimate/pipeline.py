"""The jobs themselves: `tune` a model, `evaluate` one, `predict` with one. Each reads like what it does."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from acclimate import data, methods, models, runs
from acclimate.data import BUNDLED, Table
from acclimate.errors import InputError
from acclimate.recipe import Recipe, nest
from acclimate.runs import Interrupted, Run
from acclimate.show import Silent
from acclimate.tasks import Task, get_task
from acclimate.tasks.base import Evaluation, Examples, differences

TARGETS = "all-linear"


def tune(
    recipe: Recipe | None = None,
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    before: str | Path | None = None,
    show: Any = None,
    **settings: Any,
) -> Run:
    """Adapt a model to data, measure it before and after, and write a run directory with a report.

    Parameters
    ----------
    recipe
        What to do; `settings` are recipe fields on top of it (`tune(model="smollm2", data="rows.jsonl")`).
    directory
        Where the run is written; None: the next free name under `runs/`.
    resume
        Go on with the run in `directory`, with the recipe that stands there.
    overwrite
        Replace a run that is there already.
    before
        A run with the same model and evaluation rows, whose score of the untouched model is taken over.

    Returns
    -------
    Run
        `run.path`, `run.info` (what run.json holds). See `docs/runs.md` for the files.

    Raises
    ------
    InputError
        Recipe, data or model cannot be used; the message says what to change.
    Interrupted
        Stopped by Ctrl-C or SIGTERM; go on with `resume=True`.

    Scale: under `accelerate launch` every process calls this; rank 0 writes, scoring is sharded.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    from acclimate.training import pick_device

    show = show or Silent()
    recipe = (recipe or Recipe()).replace(**settings) if settings or recipe is None else recipe
    state = PartialState(cpu=pick_device(recipe.device) == "cpu")
    writer = state.is_main_process
    if resume:
        if directory is None or not (Path(directory) / "recipe.yaml").exists():
            raise InputError(f"no run to resume at '{directory}': it has no recipe.yaml")
        recipe = Recipe.from_yaml(Path(directory) / "recipe.yaml")
    recipe = located(with_sample_defaults(recipe))
    if directory is None:
        chosen = [str(free_directory(f"{recipe.task}-{recipe.adapter}"))]
        directory = broadcast_object_list(chosen)[0]
    if writer and not resume:
        _refuse_foreign(Path(directory))
    with Run(directory, writer=writer) as run:
        if not resume:
            _start(run, recipe, overwrite)
            if before is not None and writer:
                for name in ("predictions_before.jsonl", "evaluation_before.json"):
                    runs.write_text(run / name, (Path(before) / name).read_text(encoding="utf-8"))
        elif run.finished:
            return run
        state.wait_for_everyone()  # the others look at what is there only once the writer has cleared it
        _work(run, recipe, show)
        state.wait_for_everyone()  # what the writer wrote is there for every rank that shares its disk
        if not writer and (run / "run.json").exists():
            run.info = runs.read_json(run / "run.json")
    return run


def _refuse_foreign(path: Path) -> None:
    """A directory that holds something else is left as it is, without even a lock in it."""
    if path.exists() and not path.is_dir():
        raise InputError(f"'{path}' is a file; a run is a directory. Choose another place with -o")
    if not path.is_dir() or all((path / name).exists() for name in ("run.json", "recipe.yaml")):
        return
    if any(not item.name.startswith((".lock", "run.json", runs.PARTIAL)) for item in path.iterdir()):
        raise InputError(f"'{path}' is not empty and not a run. Choose another place with -o")


def _start(run: Run, recipe: Recipe, overwrite: bool) -> None:
    if run.writer:
        # a run that failed over its input left nothing to lose: the user mends it and starts again
        ours = (".lock", "recipe.yaml", "run.json")
        something = "status" not in run.info or any(item.name not in ours for item in run.path.iterdir())
        if (run / "recipe.yaml").exists() and something and not overwrite:
            state = run.info.get("status", "unfinished")
            raise InputError(
                f"'{run.path}' already holds a run ({state}). Go on with it: --resume {run.path}; replace it: --overwrite; "
                "or choose another place with -o"
            )
        for item in run.path.iterdir():
            if item.name != ".lock":
                shutil.rmtree(item) if item.is_dir() else item.unlink()
    run.info = {}
    run.update(
        name=run.path.name,
        model=recipe.model,
        status="running",
        seed=recipe.seed,
        method={"task": recipe.task, "adapter": recipe.adapter, "init": recipe.init, "optimizer": recipe.optimizer},
        warnings=[],
        **runs.provenance(),
    )
    if run.writer:
        runs.write_text(run / "recipe.yaml", recipe.to_yaml())


def _work(run: Run, recipe: Recipe, show: Any) -> None:
    from transformers import set_seed

    from acclimate.report import write_report

    run.update(status="running", error=None)
    task = get_task(recipe.task or "choice")
    with run.stage("load data"):
        train_table, eval_table = load_tables(recipe)
        recipe = task.complete(recipe, train_table)
        if run.writer:
            runs.write_text(run / "recipe.yaml", recipe.to_yaml())
    with run.stage("load model"):
        show.say(f"loading {recipe.model}")
        set_seed(recipe.seed)
        model, tokenizer = load_for(task, recipe, show)
        train = task.examples(data.sample(train_table, recipe.max_train_samples, recipe.data_seed), recipe, tokenizer)
        held_out = task.examples(
            data.sample(eval_table, recipe.max_eval_samples, recipe.data_seed + 1), recipe, tokenizer
        )
        _check_data(run, task, recipe, train, held_out, train_table, eval_table)
        _check_training(model, task, recipe, run.path, train)

    if not (run / "evaluation_before.json").exists():
        with run.stage("evaluate before"):
            before = measure(task, model, tokenizer, held_out, recipe, show, "scoring the untouched model")
            _save_evaluation(run, before, "before")
    artifact = "model" if recipe.adapter == "full" else "adapter"
    if (run / artifact).exists():
        model = load_tuned(model, recipe, run.path)
    else:
        with run.stage("train"):
            trainer = _train(run, task, model, tokenizer, train, held_out, recipe, show)
        with run.stage("save"):
            model = _save(run, trainer, tokenizer, artifact)
    if not (run / "evaluation_after.json").exists():
        with run.stage("evaluate after"):
            after = measure(task, model, tokenizer, held_out, recipe, show, "scoring the tuned model")
            _save_evaluation(run, after, "after")
    if run.writer:
        with run.stage("report"):
            runs.write_json(run / "evaluation.json", _joined_evaluation(run, task))
            write_report(run.path)
        run.update(status="done", stage="done")
        write_report(run.path)  # once more, so that it says done and what the report itself took


def _train(
    run: Run, task: Task, model: Any, tokenizer: Any, train: Examples, held_out: Examples, recipe: Recipe, show: Any
) -> Any:
    """Attach and train; returns the trainer, with the trained model in it."""
    from transformers import set_seed

    from acclimate.training import trainable_state

    set_seed(recipe.seed)
    model = attach(model, recipe, task)
    if run.writer and changes_base(recipe) and not (run / "start").exists():
        with runs.replacing(run / "start") as temporary:  # what saving must subtract, to leave a plain LoRA
            model.save_pretrained(temporary)
    parameters = trainable_state(model)
    if not parameters["trainable"]:
        raise InputError(f"adapter '{recipe.adapter}' left nothing to train; check adapter_args")
    trainer: Any = task.trainer(model, tokenizer, train, held_out, recipe, run.path, show)
    run.update(parameters=parameters)
    runs.reset_peak_memory()
    try:
        trainer.resume()
    except Interrupted:
        raise Interrupted(
            f"stopped at step {trainer.state.global_step}; go on with: acclimate tune --resume {run.path}"
        ) from None
    steps, times, train_seconds = trainer.state.global_step, trainer.watch.step_seconds, trainer.watch.seconds
    facts: dict[str, Any] = {
        "steps": steps,
        "train_seconds": round(train_seconds, 3),
        "tokens": round(steps * recipe.train.batch_size * statistics.mean(train.lengths)),
    }
    # a run that was killed after its last step and resumed takes no step: then what is known of the earlier ones counts
    if times or "peak_memory_bytes" not in run.info:
        facts["seconds_per_step"] = round(statistics.median(times[1:] or times or [train_seconds / steps]), 4)
        facts["peak_memory_bytes"] = runs.peak_memory()
    run.update(**facts)
    return trainer


def changes_base(recipe: Recipe) -> bool:
    """Whether the start takes something out of the base weights (PiSSA, OLoRA), so that the adapter alone is not a plain LoRA."""
    return methods.find(recipe.init, "init").defaults.get("init_lora_weights") in ("pissa", "olora")


def attach(model: Any, recipe: Recipe, task: Task) -> Any:
    """The model with the recipe's adapter on it (a PeftModel), or itself for full fine-tuning.

    Raises
    ------
    InputError
        Unknown adapter argument, or target modules that match nothing (the candidates are listed).
    """
    import peft

    kind = methods.require(recipe.adapter, "adapter")
    if kind is None:
        return model.requires_grad_(True)
    init = methods.find(recipe.init, "init")
    initialise = methods.require(recipe.init, "init")
    options = {"task_type": task.peft_type, **methods.find(recipe.adapter, "adapter").defaults, **recipe.adapter_args}
    if isinstance(initialise, type):  # an initialisation that PEFT does itself is an argument of its configuration
        if recipe.init != "default" and kind is not initialise:
            raise InputError(f"init '{recipe.init}' starts LoRA; adapter '{recipe.adapter}' has its own start")
        if kind is initialise:
            options = {**options, **init.defaults, **recipe.init_args}
    try:
        config: Any = kind(**options)
    except TypeError as error:
        known = sorted(f.name for f in fields(kind) if f.init)
        raise InputError(
            f"adapter_args do not fit adapter '{recipe.adapter}': {error}. Known: {', '.join(known)}"
        ) from None
    except ValueError as error:
        raise InputError(f"adapter_args of '{recipe.adapter}': {error}") from None
    try:
        with models.quiet():
            return peft.get_peft_model(model, config)
    except ValueError as error:
        if "arget modules" in str(error):
            raise InputError(
                f"target_modules {options.get('target_modules')!r} match nothing in '{recipe.model}'. Linear layers there: "
                f"{', '.join(_linear_names(model))}. Set adapter_args.target_modules to some of them, or to all-linear"
            ) from None
        raise InputError(f"adapter '{recipe.adapter}' does not fit '{recipe.model}': {error}") from error


def _linear_names(model: Any) -> list[str]:
    import torch

    return sorted(
        {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    )


def with_sample_defaults(recipe: Recipe) -> Recipe:
    """For a bundled sample, the recipe fields that fit it, where the user set none."""
    known = BUNDLED.get(recipe.data.partition(":")[0])
    if known is None:
        if recipe.task is None:
            raise InputError("say what to learn from your data: task (--task) is one of sft, classify, choice, dpo")
        return recipe
    chosen = recipe.model_fields_set - ({"task"} if recipe.task is None else set())
    unset = {key: value for key, value in known.recipe.items() if key not in chosen}
    filled = recipe.replace(**unset)
    if filled.eval_data is None:
        filled = filled.replace(eval_data=f"{recipe.data.partition(':')[0]}:test")
    return filled


def located(recipe: Recipe) -> Recipe:
    """Local paths made absolute, so that the run can be resumed and used from any directory."""
    names = ("model", "data", "eval_data")
    known = {*BUNDLED, *models.EMBEDDED}
    local = {n: getattr(recipe, n) for n in names if getattr(recipe, n) and getattr(recipe, n) not in known}
    found = {
        n: str(Path(value).expanduser().resolve()) for n, value in local.items() if Path(value).expanduser().exists()
    }
    return recipe.replace(**found) if found else recipe


def load_tables(recipe: Recipe) -> tuple[Table, Table]:
    """Training and evaluation rows of a recipe, with our column names and ids."""

    def load(source: str, split: str) -> Table:
        table = data.read_table(source, split=split, skip_bad=recipe.skip_bad)
        return data.with_ids(data.rename_columns(table, recipe.columns))

    train = load(recipe.data, "train")
    if recipe.eval_data is None:
        return data.hold_out(train, recipe.data_seed)
    return train, load(recipe.eval_data, "test")


def load_for(task: Task, recipe: Recipe, show: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a recipe, on its device."""
    from accelerate import PartialState

    from acclimate.training import pick_device

    device = pick_device(recipe.device)
    model, tokenizer = models.load_model(
        recipe.model,
        auto_class=task.auto_class,
        trust_remote_code=recipe.trust_remote_code,
        say=show.say,
        **task.model_options(recipe),
    )
    local: Any = PartialState().device if device == "cuda" else device
    return model.to(local), tokenizer


def load_tuned(model: Any, recipe: Recipe, path: Path) -> Any:
    """A run's tuned model: the base with its adapter, or the fully trained one."""
    import peft

    device = next(model.parameters()).device
    if recipe.adapter == "full":
        with models.quiet():
            return type(model).from_pretrained(path / "model", dtype=next(model.parameters()).dtype).to(device)
    methods.require(recipe.adapter, "adapter")  # importing a tuner registers it with PEFT
    where = path / "adapter" if (path / "adapter").is_dir() else path
    if not (where / "adapter_config.json").exists():
        raise InputError(f"no adapter at '{where}': it has no adapter_config.json")
    with models.quiet():
        return peft.PeftModel.from_pretrained(model, str(where)).to(device).eval()


def load_run(path: str | Path, show: Any = None) -> tuple[Any, Any, Task, Recipe]:
    """(tuned model, tokenizer, task, recipe) of a finished run.

    Raises InputError when there is no run, or it has not been trained to the end.
    """
    path, show = Path(path), show or Silent()
    if not (path / "run.json").exists():
        raise InputError(f"no run at '{path}': it has no run.json")
    recipe = Recipe.from_yaml(path / "recipe.yaml")
    if not any((path / name).exists() for name in ("adapter", "model")):
        raise InputError(f"run '{path}' is not trained to the end. Go on with: acclimate tune --resume {path}")
    task = get_task(recipe.task or "choice")
    model, tokenizer = load_for(task, recipe, show)
    return load_tuned(model, recipe, path).eval(), tokenizer, task, recipe


def measure(
    task: Task, model: Any, tokenizer: Any, examples: Examples, recipe: Recipe, show: Any, what: str
) -> Evaluation:
    """Score a model on examples, with a progress bar and the time it took."""
    start = time.perf_counter()
    show.start(what, total=len(examples.items))
    predictions = task.predict(model, tokenizer, examples, recipe, show.advance)
    show.stop()
    evaluation = task.summarise(predictions, recipe.seed)
    evaluation.seconds = round(time.perf_counter() - start, 3)
    evaluation.truncated = examples.truncated
    return evaluation


def evaluate(
    model: str | Path,
    data_source: str | None = None,
    *,
    adapter: str | Path | None = None,
    directory: str | Path | None = None,
    show: Any = None,
    **settings: Any,
) -> Evaluation:
    """Score a run, a model, or a model with an adapter, on data.

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
    if not is_run:
        recipe = task.complete(recipe, table)
    if directory is not None and any(Path(directory).glob("*")):
        raise InputError(f"'{directory}' is not empty. Choose another place with -o")
    if is_run:
        loaded, tokenizer, task, _ = load_run(model, show)
    else:
        loaded, tokenizer = load_for(task, recipe, show)
        if adapter is not None:
            loaded = load_tuned(loaded, recipe.replace(adapter="lora"), Path(adapter))
    examples = task.examples(data.sample(table, recipe.max_eval_samples, recipe.data_seed + 1), recipe, tokenizer)
    if not examples.items:
        raise InputError(f"no usable rows in '{table.source}'")
    evaluation = measure(task, loaded, tokenizer, examples, recipe, show, f"scoring {len(examples.items)} rows")
    if directory is not None:
        path = Path(directory)
        runs.write_jsonl(path / "predictions.jsonl", evaluation.predictions)
        runs.write_json(path / "evaluation.json", {"task": task.name, "before": None, "after": evaluation.to_dict()})
        write_report(path)
    return evaluation


def predict(run: str | Path, rows: Iterable[data.Row], *, batch_size: int = 64, show: Any = None) -> Iterator[data.Row]:
    """Answer rows with a run's model, in order, a batch at a time, so that a stream of any length fits.

    Yields one row each: `prediction`, `confidence` and `probs` for choice and classify; `completion` for sft and dpo.
    Rows need the run's input columns (`text`, say); answers are not looked at. Raises InputError for a row without them.
    """
    loaded = load_run(run, show)
    stream, done = iter(rows), 0
    while batch := list(itertools.islice(stream, batch_size)):
        yield from answer_rows(*loaded, batch, f"input after row {done}" if done else "input")
        done += len(batch)


def answer_rows(
    model: Any, tokenizer: Any, task: Task, recipe: Recipe, rows: list[data.Row], source: str = "input"
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
        answers = task.predict(model, tokenizer, examples, recipe)
    for row, answer in zip(rows, answers, strict=True):
        yield row | {
            key: value for key, value in answer.items() if not key.startswith("_") and key not in ("id", "text")
        }


def export(run: str | Path, to: str, directory: str | Path, show: Any = None) -> Path:
    """Write a run's result for use elsewhere: `peft` (the adapter folder) or `merged` (a whole model, adapter folded in)."""
    path, directory = Path(run), Path(directory)
    if to not in ("peft", "merged"):
        raise InputError(f"--to is peft or merged, not '{to}'")
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
    model, tokenizer, _, _ = load_run(path, show)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload(safe_merge=True)
    with models.quiet(), runs.replacing(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return directory


def free_directory(stem: str, root: str = "runs") -> Path:
    """The first of runs/stem, runs/stem-2, ... that does not exist."""
    path, number = Path(root) / stem, 2
    while path.exists():
        path, number = Path(root) / f"{stem}-{number}", number + 1
    return path


# --- what a run checks and writes ---


def _check_training(model: Any, task: Task, recipe: Recipe, path: Path, train: Examples) -> None:
    """Find out now what would fail only after the untouched model has been scored: adapter and training settings."""
    import torch

    from acclimate.training import arguments

    arguments(recipe, path, train.lengths)
    with torch.device("meta"):  # the architecture without its weights
        shell = type(model)(model.config)
    attach(shell, recipe.replace(init="default", init_args={}) if changes_base(recipe) else recipe, task)


def _check_data(
    run: Run, task: Task, recipe: Recipe, train: Examples, held_out: Examples, train_table: Table, eval_table: Table
) -> None:
    for examples, table in ((train, train_table), (held_out, eval_table)):
        if not examples.items:
            raise InputError(f"no usable rows in '{table.source}' ({examples.skipped} were left out)")
    repeated = data.overlap(Table(train.rows, ""), Table(held_out.rows, ""), task.content(recipe))
    facts = {
        "source": train_table.source,
        "eval_source": eval_table.source,
        "train_rows": len(train.items),
        "eval_rows": len(held_out.items),
        "skipped": train.skipped + held_out.skipped,
        "truncated_train": train.truncated,
        "truncated_eval": held_out.truncated,
        "overlap": repeated,
    }
    run.update(data=facts)
    if repeated:
        run.warn(
            f"{repeated} of {len(held_out.items)} evaluation rows also stand in training: the score after is too good"
        )
    if facts["skipped"]:
        run.warn(f"{facts['skipped']} bad rows were left out")
    if train.truncated or held_out.truncated:
        run.warn(
            f"{task.cut}: {train.truncated} in training, {held_out.truncated} in evaluation. Raise max_length to keep them whole"
        )
    if task.name == "classify":
        run.warn(
            "the classification head is new, so the score before is that of random guesses, not of the model's knowledge"
        )


def _save(run: Run, trainer: Any, tokenizer: Any, artifact: str) -> Any:
    """Write what was trained, as an ordinary LoRA folder wherever it is one; returns the trained model without wrappers."""
    # collective under FSDP, where every rank holds a shard
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if "ref" in getattr(model, "peft_config", {}):  # TRL's copy of the start, which DPO compared with
        model.delete_adapter("ref")
    if not run.writer:
        return model
    with models.quiet(), runs.replacing(run / artifact) as temporary, tempfile.TemporaryDirectory() as scratch:
        options: dict[str, Any] = {}
        if (run / "start").exists():
            shutil.copytree(run / "start", scratch, dirs_exist_ok=True)  # PEFT writes into it
            options["path_initial_model_for_weight_conversion"] = scratch
        model.save_pretrained(temporary, state_dict=state, **options)
        if artifact == "model":
            tokenizer.save_pretrained(temporary)
    weights = sum(file.stat().st_size for file in (run / artifact).glob("*.safetensors"))
    run.update(adapter_bytes=weights, artifacts={artifact: f"{artifact}/"})
    return model


def _save_evaluation(run: Run, evaluation: Evaluation, when: str) -> None:
    if not run.writer:
        return
    suffix = "_before" if when == "before" else ""
    runs.write_jsonl(run / f"predictions{suffix}.jsonl", evaluation.predictions)
    runs.write_json(run / f"evaluation_{when}.json", evaluation.to_dict())


def _joined_evaluation(run: Run, task: Task) -> dict[str, Any]:
    return {
        "task": task.name,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "before": runs.read_json(run / "evaluation_before.json"),
        "after": runs.read_json(run / "evaluation_after.json"),
        "differences": differences(read_rows(run / "predictions.jsonl"), read_rows(run / "predictions_before.jsonl")),
    }


def read_rows(path: Path) -> list[data.Row]:
    """A JSONL file of ours."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    raise InputError(f"no file '{path}'")
