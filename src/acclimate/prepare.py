"""From a recipe to what it names: rows, a model with its tokenizer, and the adapter on it, new or trained."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

from acclimate import data, methods, models
from acclimate.data import BUNDLED, Table
from acclimate.errors import InputError, did_you_mean
from acclimate.recipe import Recipe
from acclimate.show import Silent
from acclimate.tasks import Task, get_task


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

    from acclimate.arguments import pick_device

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


def attach(model: Any, recipe: Recipe, task: Task) -> Any:
    """The model with the recipe's adapter on it (a PeftModel), or itself for full fine-tuning.

    Raises
    ------
    InputError
        Unknown adapter argument, or target modules that match nothing (the candidates are listed).
    """
    import peft

    if own := own_adapter(recipe.model):
        check_own(recipe, task)
        with models.quiet():
            return peft.PeftModel.from_pretrained(model, str(own), is_trainable=True)
    kind = methods.require(recipe.adapter, "adapter")
    if kind is None:
        return model.requires_grad_(True)
    init = methods.find(recipe.init, "init")
    initialise = methods.require(recipe.init, "init")
    if not isinstance(initialise, type):
        _check_start(initialise, kind, recipe)
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
    except (ValueError, TypeError) as error:
        if "arget modules" in str(error):
            raise InputError(
                f"target_modules {options.get('target_modules')!r} match nothing in '{recipe.model}'. Linear layers there: "
                f"{', '.join(_linear_names(model))}. Set adapter_args.target_modules to some of them, or to all-linear"
            ) from None
        raise InputError(f"adapter '{recipe.adapter}' does not fit '{recipe.model}': {error}") from error


def own_adapter(model: str) -> Path | None:
    """The adapter that came with a model directory and belongs to its weights, as `acclimate quantize` writes it."""
    path = Path(model).expanduser() / "adapter"
    return path if (path.parent / "config.json").exists() and (path / "adapter_config.json").exists() else None


def with_own_adapter(model: Any, recipe: Recipe) -> Any:
    """The model with the adapter that came with it; itself where it has none."""
    own = own_adapter(recipe.model)
    return model if own is None else load_tuned(model, recipe.replace(adapter="lora", init="default"), own)


def check_own(recipe: Recipe, task: Task) -> None:
    """Raises InputError where a recipe does not go on with the adapter that came with its model."""
    if recipe.adapter != "lora" or recipe.adapter_args or recipe.init != "default":
        raise InputError(
            f"'{recipe.model}' has an adapter of its own, which its quantised weights need; training goes on from there. "
            "Leave adapter, adapter_args and init as they are by default"
        )
    if task.auto_class != "AutoModelForCausalLM":
        raise InputError(
            f"the adapter that belongs to '{recipe.model}' is for a language model, and task '{task.name}' trains a new head. Take task choice"
        )


def _check_start(initialise: Any, kind: type, recipe: Recipe) -> None:
    """A start that looks at the data (fisher, principal) is for LoRA; its arguments must be known before any work is done."""
    import peft

    if kind is not peft.LoraConfig:
        raise InputError(f"init '{recipe.init}' starts LoRA; adapter '{recipe.adapter}' has its own start")
    known = set(inspect.signature(initialise).parameters) - {"peft_model", "data", "loss_fn", "adapter_name", "advance"}
    for key in recipe.init_args:
        if key not in known:
            raise InputError(
                f"init_args do not fit init '{recipe.init}': unknown '{key}'.{did_you_mean(key, known)} "
                f"Known: {', '.join(sorted(known))}"
            )
    if recipe.init_args.get("fisher") == "true" and recipe.task != "sft":
        raise InputError(
            f"init_args.fisher 'true' draws labels token by token, for task 'sft'; for '{recipe.task}' take 'empirical'"
        )
    if recipe.init_args.get("mode") == "residual" and recipe.task == "dpo":
        raise InputError(
            "init_args.mode 'residual' does not fit task 'dpo', which switches adapters itself; take 'split'"
        )
    if methods.find(recipe.init, "init").name == "principal" and recipe.task == "dpo":
        raise InputError(
            "init 'principal' does not fit task 'dpo', which switches adapters itself as this start does; take 'fisher'"
        )


def looks_at_data(recipe: Recipe) -> bool:
    """Whether the adapter's start is found by a pass over the training data, after the trainer is there."""
    return not isinstance(methods.require(recipe.init, "init"), type)


def start_from_data(model: Any, trainer: Any, lengths: list[int], recipe: Recipe, show: Any) -> Any:
    """Run a start that looks at the data, on the trainer's own rows and loss; returns its report.

    Every process makes the same pass over the same rows, so that all hold the same start.

    Raises InputError when the start refuses its arguments or the data.
    """
    import torch

    initialise: Any = methods.require(recipe.init, "init")
    options = dict(recipe.init_args)
    if "seed" in inspect.signature(initialise).parameters:
        options = {"seed": recipe.seed, **options}
    size = max(1, min(32, 1024 // max(lengths)))  # enough positions for a matrix product, however long the rows
    rows = torch.utils.data.DataLoader(
        trainer.train_dataset,
        batch_size=size,
        shuffle=True,
        generator=torch.Generator().manual_seed(options.get("seed", recipe.seed)),
        collate_fn=trainer.data_collator,
    )
    loss_fn = None if options.get("fisher") == "true" else trainer.summed_loss
    show.start("finding the start", total=min(options.get("n_examples", 256), len(trainer.train_dataset)))
    try:
        return initialise(model, rows, loss_fn=loss_fn, advance=show.advance, **options)
    except (ValueError, TypeError) as error:
        raise InputError(f"init '{recipe.init}': {error}") from error
    finally:
        show.stop()


def load_start(model: Any, path: Path) -> Any:
    """The untrained adapter that `start_from_data` found, on a fresh base model, to resume on."""
    import peft

    from acclimate.adapters import residual

    with models.quiet():
        model = peft.PeftModel.from_pretrained(model, str(path), is_trainable=True)
    if (path / residual.START).is_dir():
        residual.add_start(model)
        model.load_adapter(str(path / residual.START), residual.START, is_trainable=False)
        model.base_model.set_adapter(["default", residual.START])
        residual.watch(model)
    return model


def _linear_names(model: Any) -> list[str]:
    import torch

    return sorted(
        {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    )


def changes_base(recipe: Recipe) -> bool:
    """Whether the start takes something out of the base weights (PiSSA, OLoRA), so that the adapter alone is not a plain LoRA."""
    return methods.find(recipe.init, "init").defaults.get("init_lora_weights") in ("pissa", "olora")


def load_tuned(model: Any, recipe: Recipe, path: Path) -> Any:
    """A run's tuned model: the base with its adapter, or the fully trained one."""
    import peft

    import acclimate.adapters  # noqa: F401 - registers our tuners with PEFT: the folder may hold any of them

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
