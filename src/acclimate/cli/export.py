"""`acclimate export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.common import Json, Output, Quiet, Speaker

EXAMPLES = """
Write a run's result for use elsewhere: the PEFT adapter folder, or a whole model with the adapter merged in.

**Examples**

```
acclimate export runs/choice-lora --to peft -o my-adapter
acclimate export runs/choice-lora --to merged -o my-model
```
"""


def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[str, typer.Option(help="peft or merged.")],
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from acclimate.use import export as work

    speaker = Speaker(as_json, quiet)
    directory = work(run, to, output or Path(f"{run.name}-{to}"), show=speaker.show)
    speaker.result({"directory": str(directory), "format": to}, f"wrote {directory}")


def register(app: typer.Typer) -> None:
    app.command("export", help=EXAMPLES)(export)
