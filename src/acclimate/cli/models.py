"""`acclimate models`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from acclimate.cli.common import Json, Quiet, Speaker

models_app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@models_app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Embedded model, see `acclimate models list`.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch an embedded model and convert it, once, into the user's cache.

    **Example**

        acclimate models add smollm2
    """
    from acclimate.models import add as work

    speaker = Speaker(as_json, quiet)
    path = work(name, speaker.show.say)
    speaker.result({"name": name, "path": str(path)}, f"{name} is ready in {path}")


@models_app.command("list")
def list_models(as_json: Json = False, quiet: Quiet = False) -> None:
    """The embedded models and whether they are ready."""
    from rich.table import Table

    from acclimate.models import EMBEDDED, embedded_path, is_ready

    table = Table()
    for column in ("name", "what it is", "licence", "ready", "where"):
        table.add_column(column, overflow="fold")
    rows = []
    for name, model in EMBEDDED.items():
        ready = is_ready(name)
        rows.append(
            {
                "name": name,
                "about": model.about,
                "licence": model.licence,
                "ready": ready,
                "path": str(embedded_path(name)),
            }
        )
        table.add_row(
            name,
            model.about,
            model.licence,
            "yes" if ready else f"acclimate models add {name}",
            escape(str(embedded_path(name))),
        )
    Speaker(as_json, quiet).result(rows, table)


def register(app: typer.Typer) -> None:
    app.add_typer(models_app, name="models", help="Embedded models: list them, fetch and convert one.")
