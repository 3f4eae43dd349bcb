"""The main job: `tune` reads like what it does. Load, measure, attach, train, save, measure, report."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from acclimate import data, models, runs
from acclimate.data import Table
from acclimate.errors import InputError
from acclimate.prepare import (
    attach,
    changes_base,
    check_own,
    load_for,
    load_start,
    load_tables,
    load_tuned,
    located,
    looks_at_data,
    own_adapter,
    start_from_data,
    with_own_adapter,
    with_sample_defaults,
)
from acclimate.recipe import Recipe
from acclimate.runs import Interrupted, Run, free_directory, read_rows
from acclimate.show import Silent
from acclimate.tasks import Task, get_task
from acclimate.tasks.base import Evaluation, Examples, differences
from acclimate.use import measure


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

    >>> run = tune(max_eval_samples=8, train={"max_steps": 2, "batch_size": 4}, directory="runs/example")
    >>> run.info["status"], (run / "report.html").exists()
    ('done', True)

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

    from acclimate.arguments import pick_device

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
            untouched = with_own_adapter(model, recipe)
            before = measure(task, untouched, tokenizer, held_out, recipe, show, "scoring the untouched model")
            _save_evaluation(run, before, "before")
            if untouched is not model:
                model = untouched.unload()
    artifact = "model" if recipe.adapter == "full" else "adapter"
    if (run / artifact).exists():
        model = load_tuned(model, recipe, run.path)
    else:
        with run.stage("train"):
            trainer = _train(run, task, model, tokenizer, train, held_out, recipe, show)
        with run.stage("save"):
            model = _save(run, trainer, tokenizer, recipe, artifact)
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
    from accelerate import PartialState
    from transformers import set_seed

    from acclimate.training import trainable_state

    set_seed(recipe.seed)
    started = looks_at_data(recipe) and (run / "start").is_dir()
    PartialState().wait_for_everyone()  # before one of them writes it
    model = load_start(model, run / "start") if started else attach(model, recipe, task)
    if run.writer and changes_base(recipe) and not (run / "start").exists():
        with runs.replacing(run / "start") as temporary:  # what saving must subtract, to leave a plain LoRA
            model.save_pretrained(temporary)
    if not trainable_state(model)["trainable"]:
        raise InputError(f"adapter '{recipe.adapter}' left nothing to train; check adapter_args")
    trainer: Any = task.trainer(model, tokenizer, train, held_out, recipe, run.path, show)
    own_callbacks = getattr(getattr(model, "active_peft_config", None), "trainer_callbacks", None)
    for callback in own_callbacks(len(train.items)) if own_callbacks else ():  # an adapter's own term of the objective
        trainer.put_first(callback)
    runs.reset_peak_memory()
    if looks_at_data(recipe) and not started:
        _start_from_data(run, model, trainer, train.lengths, recipe, show)
    run.update(parameters=trainable_state(model))
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


def _start_from_data(run: Run, model: Any, trainer: Any, lengths: list[int], recipe: Recipe, show: Any) -> None:
    """Find the adapter's start and keep it in `start/`, for a resumed run; what it rests on goes to init.json."""
    import peft

    with run.stage("find the start"):
        report = start_from_data(model, trainer, lengths, recipe, show)
        if not run.writer:
            return
        runs.write_json(run / "init.json", report.to_dict())
        with models.quiet(), runs.replacing(run / "start") as temporary:
            # as it is trained, not as it will be saved
            peft.PeftModel.save_pretrained(
                model, str(temporary), selected_adapters=[n for n in model.peft_config if n != "ref"]
            )


# --- what a run checks and writes ---


def _check_training(model: Any, task: Task, recipe: Recipe, path: Path, train: Examples) -> None:
    """Find out now what would fail only after the untouched model has been scored: adapter and training settings."""
    import torch

    from acclimate.arguments import arguments

    arguments(recipe, path, train.lengths)
    if own_adapter(recipe.model):
        check_own(recipe, task)
        return
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


def _save(run: Run, trainer: Any, tokenizer: Any, recipe: Recipe, artifact: str) -> Any:
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
        if changes_base(recipe):
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
