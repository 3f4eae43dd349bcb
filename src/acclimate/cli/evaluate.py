"""`acclimate evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.common import Json, Output, Quiet, Set, Speaker, metric_text

EXAMPLES = """
Score a run, a model, or a model with an adapter: task metric, NLL, perplexity, calibration, with 95% intervals.

**Examples**

```
acclimate evaluate runs/choice-lora
acclimate evaluate runs/choice-lora --data fresh.csv -o runs/fresh
acclimate evaluate runs/choice-bayesian-lora --samples 16
acclimate evaluate smollm2 --data clinc150 --set max_eval_samples=200
acclimate evaluate smollm2 --adapter runs/choice-lora/adapter --data clinc150 --json
```
"""


def evaluate(
    model: Annotated[str, typer.Argument(help="Run directory, or a model by embedded name, directory or hub id.")],
    data: Annotated[
        str | None, typer.Option(help="Rows to score; default: the run's evaluation rows.", show_default=False)
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="PEFT adapter directory to put on the model.", show_default=False)
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Draws of a Bayesian adapter's weights to average over; default 8.", show_default=False),
    ] = None,
    task: Annotated[str | None, typer.Option(help="sft, classify, choice or dpo.", show_default=False)] = None,
    settings: Set = None,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from acclimate.recipe import parse_assignments
    from acclimate.runs import free_directory
    from acclimate.use import evaluate as work

    speaker = Speaker(as_json, quiet)
    fields = parse_assignments(settings or []) | ({"task": task} if task else {})
    directory = output or free_directory(f"evaluation-{Path(model).name}")
    result = work(model, data, adapter=adapter, directory=directory, samples=samples, show=speaker.show, **fields)
    table = Table(title=f"{escape(model)}: {len(result.predictions)} rows", title_justify="left")
    table.add_column("metric")
    sampled = result.sampled
    table.add_column("value (95% interval)" if sampled is None else "posterior mean (95% interval)")
    if sampled is not None:
        table.add_column(f"average of {sampled.draws} draws (95% interval)")
    for name in dict.fromkeys([*result.metrics, *(sampled.metrics if sampled else ())]):
        shown = [metric_text(part.metrics[name]) if name in part.metrics else "" for part in (result, sampled) if part]
        table.add_row(name, *shown)
    document = {"directory": str(directory), "task": result.task, **result.to_dict()}
    speaker.result(document, table, result.definition, f"report  {directory / 'report.html'}")


def register(app: typer.Typer) -> None:
    app.command("evaluate", help=EXAMPLES)(evaluate)
