"""`acclimate bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.common import Json, Quiet, Speaker, bytes_text, seconds_text

EXAMPLES = """
Run a method's claim: its headline as an experiment against real peers, with a verdict.

**Examples**

```
acclimate bench lora
acclimate bench lora --fast --json
```
"""


def bench(
    name: Annotated[str, typer.Argument(help="Method, see `acclimate methods`.")],
    fast: Annotated[
        bool, typer.Option("--fast", help="Under a minute, to see that it runs; no verdict to rely on.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="More data and seeds.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where NAME.json and NAME.svg go; default: evidence/, nowhere with --fast."
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.claims.base import load_claim
    from acclimate.errors import InputError

    if fast and full:
        raise InputError("--fast and --full exclude each other")
    speaker = Speaker(as_json, quiet)
    claim = load_claim(name)
    evidence = claim.run("fast" if fast else "full" if full else "default", speaker.show.say)
    place = output or (None if fast else Path("evidence"))  # a fast run must not replace the committed evidence
    lines = [*evidence.reasons, f"verdict: {evidence.verdict}"]
    if place is not None:
        lines.append(f"wrote {evidence.save(place)}")
    table = Table(title=claim.statement, title_justify="left")
    for column in ("system", "metric", "mean", "interval", "seeds", "time", "peak memory", "parameters"):
        table.add_column(column)
    for row in evidence.rows:
        interval = "" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
        table.add_row(
            row.system,
            row.metric,
            f"{row.mean:.3f}",
            interval,
            str(len(row.seeds)),
            "" if row.seconds is None else seconds_text(row.seconds),
            bytes_text(row.peak_memory_bytes),
            "" if row.parameters is None else f"{row.parameters:,}",
        )
    speaker.result(json.loads(evidence.to_json()), table, *lines)


def register(app: typer.Typer) -> None:
    app.command("bench", help=EXAMPLES)(bench)
