"""`acclimate methods`."""

from __future__ import annotations

from typing import Annotated

import typer

from acclimate.cli.common import Json, Quiet, Speaker

EXAMPLES = """
The table of all methods: what each does, where it plugs in, how to select it, and whether it is built.

**Examples**

```
acclimate methods
acclimate methods --stage adapter
acclimate methods --json
```
"""


def methods(
    stage: Annotated[str | None, typer.Option(help="Only this stage, e.g. adapter.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.errors import InputError, did_you_mean
    from acclimate.methods import all_methods

    rows = [row for row in all_methods() if stage is None or row.stage == stage]
    if not rows:
        stages = sorted({row.stage for row in all_methods()})
        raise InputError(f"no stage '{stage}'.{did_you_mean(stage or '', stages)} Stages: {', '.join(stages)}")
    table = Table()
    for column in ("method", "stage", "status", "what it does", "select it with", "extra"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, row.stage, row.status, row.job, row.option, row.extra or "")
    fields = ("name", "stage", "status", "job", "option", "extra", "paper", "claim")
    Speaker(as_json, quiet).result([{f: getattr(row, f) for f in fields} for row in rows], table)


def register(app: typer.Typer) -> None:
    app.command("methods", help=EXAMPLES)(methods)
