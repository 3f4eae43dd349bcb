"""What `merge` and `soup` share: the options of `--evaluate`, and what is shown of the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import metric_text

Evaluate = Annotated[
    list[str] | None,
    typer.Option(
        help="Score inputs and result on these rows: DATA or NAME=DATA as for `evaluate --data`, or `own`, those of a run. May be given "
        "several times.",
        metavar="DATA",
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--model", help="evaluate: the adapters' base model, if they do not say.", show_default=False),
]
ScoredTask = Annotated[
    str | None, typer.Option("--task", help="evaluate: sft, classify, choice or dpo.", show_default=False)
]


def recipe_fields(task: str | None, assignments: list[str] | None) -> dict[str, Any]:
    """The recipe keys of --task and --set."""
    from acclimate.recipe import parse_assignments

    return parse_assignments(assignments or []) | ({"task": task} if task else {})


def scores_shown(document: Mapping[str, Any], directory: Path) -> Iterator[Any]:
    """A table of the systems on each set of rows, and the conclusions."""
    from rich.table import Table

    table = Table("system", *(f"{part['name']}: {part['metric']}" for part in document["rows"]), "kept")
    for system in document["systems"]:
        scores = (system["scores"].get(part["name"]) for part in document["rows"])
        kept = "" if system["mean_kept"] is None else f"{system['mean_kept']:.1%}"
        table.add_row(system["name"], *(metric_text(entry) if entry else "" for entry in scores), kept)
    yield table
    yield from document["conclusion"]
    yield f"report  {directory / 'report.html'}"
