"""`acclimate tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import Json, Output, Quiet, Set, Speaker, bytes_text, metric_text, seconds_text, speaks

EXAMPLES = """
Adapt a model to data; measure before and after; write a run directory with a report.

With neither recipe nor flags: the embedded model on the bundled sample.

**Examples**

```
acclimate tune
acclimate tune --data tickets.csv --task choice --adapter lora --seed 1
acclimate tune recipe.yaml --set train.lr=5e-4 -o runs/try-2
acclimate tune --model ./my-model --data chats.jsonl --task sft
acclimate tune --resume runs/try-2
accelerate launch --num_processes 2 -m acclimate tune recipe.yaml
```
"""


def recipe_from_flags(recipe: Path | None, settings: list[str] | None, **flags: Any) -> Any:
    """Recipe file, then flags, then --set: later wins."""
    from acclimate.recipe import Recipe, nest, parse_assignments, read_yaml

    values = nest(
        {key: value for key, value in flags.items() if value is not None}, into=read_yaml(recipe) if recipe else {}
    )
    return Recipe(**nest(parse_assignments(settings or []), into=values))


def tune(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file (YAML).", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="Embedded name, directory, GGUF file or hub id.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="JSONL, CSV, Parquet, hub id or bundled sample.", show_default=False)
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Held-out rows; default: a tenth of the data.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="sft, classify, choice or dpo.", show_default=False)] = None,
    adapter: Annotated[
        str | None, typer.Option(help="See `acclimate methods --stage adapter`.", show_default=False)
    ] = None,
    init: Annotated[str | None, typer.Option(help="See `acclimate methods --stage init`.", show_default=False)] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="See `acclimate methods --stage optimizer`.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", show_default=False)] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out unreadable rows and count them.")] = False,
    settings: Set = None,
    output: Output = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --output.")] = False,
    before: Annotated[Path | None, typer.Option(hidden=True)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from acclimate.errors import InputError

    speaker = Speaker(as_json, quiet)
    flags = {
        "model": model, "data": data, "eval_data": eval_data, "task": task, "adapter": adapter, "init": init,
        "optimizer": optimizer, "seed": seed, "skip_bad": skip_bad or None,
    }  # fmt: skip
    if resume is not None:
        if recipe or settings or output or overwrite or any(value is not None for value in flags.values()):
            raise InputError("--resume goes on with the run's own recipe; it takes no other recipe, flags or output")
        from acclimate.pipeline import tune as work

        run = work(directory=resume, resume=True, show=speaker.show)
    else:
        chosen = recipe_from_flags(recipe, settings, **flags)
        from acclimate.pipeline import tune as work

        run = work(chosen, directory=output, overwrite=overwrite, before=before, show=speaker.show)
    if speaks():
        report_run(run, speaker)


def report_run(run: Any, speaker: Speaker) -> None:
    from rich.markup import escape
    from rich.table import Table

    from acclimate.runs import read_json

    evaluation = read_json(run / "evaluation.json")
    table = Table(
        title=escape(f"{run.info['method']['adapter']} on {run.info['data']['source']}"), title_justify="left"
    )
    for column in ("metric", "before", "after", "change"):
        table.add_column(column)
    for name, after in evaluation["after"]["metrics"].items():
        difference = evaluation["differences"].get(name)
        table.add_row(
            name,
            metric_text(evaluation["before"]["metrics"][name]),
            metric_text(after),
            f"{difference['value']:+.3f}, {difference['verdict']}" if difference else "",
        )
    info = run.info
    main = evaluation["differences"][evaluation["metric"]]
    lines = [
        main["words"],
        f"trained {info['parameters']['trainable']:,} of {info['parameters']['total']:,} parameters in {info['steps']} steps, "
        f"{seconds_text(info['timings'].get('train', 0))}; peak memory {bytes_text(info.get('peak_memory_bytes'))}; "
        f"weights to keep {bytes_text(info['adapter_bytes'])}",
        *(f"note: {text}" for text in info["warnings"]),
        f"report   {run / 'report.html'}",
        f"adapter  {run / next(iter(info['artifacts']))}",
        f"try it   acclimate predict {run.path} --input FILE",
    ]
    speaker.result({"run": str(run.path), "evaluation": evaluation, "info": info}, table, *lines)


def register(app: typer.Typer) -> None:
    app.command("tune", help=EXAMPLES)(tune)
