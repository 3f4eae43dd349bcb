"""`acclimate predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import Json, Quiet, Speaker
from acclimate.errors import InputError

EXAMPLES = """
Answer rows with a run's model. Reads JSONL, CSV or plain lines; streams JSONL to stdout, one row an input row.

**Examples**

```
acclimate predict runs/choice-lora --input requests.txt
acclimate predict runs/choice-lora --input rows.csv > answers.jsonl
acclimate predict runs/choice-bayesian-lora --input requests.txt --samples 8
echo "move 50 dollars to savings" | acclimate predict runs/choice-lora
```
"""


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    source: Annotated[str, typer.Option("--input", "-i", help="File, bundled sample, or - for standard input.")] = "-",
    samples: Annotated[
        int | None,
        typer.Option(
            help="Average over this many draws of a Bayesian adapter's weights, and say how unsure the answer is.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from acclimate.data import BUNDLED, FILE_ENDINGS, read_lines, read_table
    from acclimate.recipe import Recipe
    from acclimate.use import predict as work

    show = Speaker(as_json, quiet).show
    if not (run / "recipe.yaml").exists():
        raise InputError(f"no run at '{run}': it has no recipe.yaml")
    column = "prompt" if Recipe.from_yaml(run / "recipe.yaml").task in ("sft", "dpo") else "text"
    if source == "-":
        rows: Any = _lines(column)
    elif Path(source).suffix.lower() in (*FILE_ENDINGS, ".gz") or source.partition(":")[0] in BUNDLED:
        rows = read_table(source, split="test").rows
    else:
        if not Path(source).is_file():
            raise InputError(f"no file '{source}'")
        rows = [{column: line} for line in read_lines(Path(source))]
    if as_json:  # one document, as everywhere; for long inputs the stream is better
        typer.echo(json.dumps(list(work(run, rows, samples=samples, show=show)), ensure_ascii=False))
        return
    batch = 1 if source == "-" and sys.stdin.isatty() else 64
    for row in work(run, rows, batch_size=batch, samples=samples, show=show):
        typer.echo(json.dumps(row, ensure_ascii=False))
        sys.stdout.flush()


def _lines(column: str) -> Iterator[dict[str, Any]]:
    """Rows from standard input: a line that is a JSON object is a row, any other line is the input text."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(f"line {number} of standard input is not UTF-8") from None
        if not text.strip():
            continue
        if text.lstrip().startswith("{"):
            try:
                row = json.loads(text)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
                continue
        yield {column: text}


def register(app: typer.Typer) -> None:
    app.command("predict", help=EXAMPLES)(predict)
