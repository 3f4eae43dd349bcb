"""`acclimate compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.common import Json, Output, Quiet, Set, Speaker, bytes_text, metric_text
from acclimate.cli.tune import recipe_from_flags

EXAMPLES = """
Run every combination on the same data, order and budget, next to the untouched base, and say which differences are real.

**Examples**

```
acclimate compare --data clinc150 --vary adapter=lora,ia3,full --seeds 3
acclimate compare recipe.yaml --vary adapter=lora --vary optimizer=adamw,adafactor --budget tokens=50000
acclimate compare recipe.yaml --vary train.lr=3e-4,1e-3,3e-3 -o runs/lr --json
acclimate compare --resume runs/lr
```
"""


def compare(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file (YAML).", show_default=False)] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="key=value,value,.. of any recipe key.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per combination, with seeds 0, 1, ...")] = 3,
    budget: Annotated[
        str, typer.Option(help="steps (the recipe's), steps=N, tokens=N or seconds=N for every run.")
    ] = "steps",
    model: Annotated[str | None, typer.Option(help="As for tune.", show_default=False)] = None,
    data: Annotated[str | None, typer.Option(help="As for tune.", show_default=False)] = None,
    eval_data: Annotated[str | None, typer.Option(help="As for tune.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help="As for tune.", show_default=False)] = None,
    settings: Set = None,
    output: Output = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this comparison.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from acclimate.comparison import compare as work
    from acclimate.comparison import parse_vary, resume_comparison
    from acclimate.errors import InputError

    speaker = Speaker(as_json, quiet)
    if resume is not None:
        if recipe or vary or settings or output:
            raise InputError("--resume goes on with the comparison's own settings; it takes no others")
        result = resume_comparison(resume, show=speaker.show)
    else:
        chosen = recipe_from_flags(recipe, settings, model=model, data=data, eval_data=eval_data, task=task)
        result = work(chosen, parse_vary(vary or []), seeds=seeds, budget=budget, directory=output, show=speaker.show)
    document = result.document
    table = Table(
        title=f"examples: {document['n_examples']}, seeds: {len(document['seeds'])}, budget: {document['budget']}",
        title_justify="left",
    )
    table.add_column("", min_width=20, overflow="fold")
    for column in (document["metric"], "trainable", "memory", "s / step", "file"):
        table.add_column(column, overflow="fold")
    base = document["base"]
    table.add_row("base", metric_text(base["metrics"][document["metric"]]), "0", "", "", "")
    for cell in document["cells"]:
        if not cell["metrics"]:
            table.add_row(escape(cell["name"]), "failed", "", "", "", "")
            continue
        table.add_row(
            escape(cell["name"]),
            metric_text(cell["metrics"][document["metric"]]),
            f"{cell['trainable']:,}",
            bytes_text(cell["peak_memory_bytes"]),
            f"{cell['seconds_per_step']:.2f}",
            bytes_text(cell["adapter_bytes"]),
        )
    speaker.result(document, table, *document["conclusion"], f"report  {result.path / 'report.html'}")


def register(app: typer.Typer) -> None:
    app.command("compare", help=EXAMPLES)(compare)
