"""`acclimate export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.common import Json, Output, Quiet, Speaker

EXAMPLES = """
Write a run's result for use elsewhere: the PEFT adapter folder, a whole model with the adapter merged in, or the mean (or
draws) of a Bayesian adapter as plain LoRA folders.

**Examples**

```
acclimate export runs/choice-lora --to peft -o my-adapter
acclimate export runs/choice-lora --to merged -o my-model
acclimate export runs/choice-bayesian-lora --to lora --samples 8 -o my-ensemble
```
"""


def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[str, typer.Option(help="peft, merged or lora.")],
    samples: Annotated[
        int | None,
        typer.Option(help="With --to lora: this many draws of a Bayesian adapter, a folder each.", show_default=False),
    ] = None,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from acclimate.use import export as work

    speaker = Speaker(as_json, quiet)
    directory = work(run, to, output or Path(f"{run.name}-{to}"), show=speaker.show, samples=samples)
    speaker.result({"directory": str(directory), "format": to}, f"wrote {directory}")


def register(app: typer.Typer) -> None:
    app.command("export", help=EXAMPLES)(export)
