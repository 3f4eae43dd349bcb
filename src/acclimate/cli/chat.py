"""`acclimate chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import Quiet, Speaker, err, out

EXAMPLES = """
Try a run's model by hand. A chat for sft and dpo; for choice and classify, each line is answered with its probabilities.

Empty line or Ctrl-D ends; `/new` starts a new chat.

**Examples**

```
acclimate chat runs/sft-lora
acclimate chat runs/choice-lora
```
"""


def chat(run: Annotated[Path, typer.Argument(help="Run directory.")], quiet: Quiet = False) -> None:
    from acclimate.generate import stream_reply
    from acclimate.prepare import load_run
    from acclimate.use import answer_rows

    loaded = load_run(run, Speaker(False, quiet).show)
    model, tokenizer, task, _ = loaded
    messages: list[dict[str, str]] = []
    err.print("[dim]empty line or Ctrl-D to end, /new for a new chat[/dim]")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            break
        if not line:
            break
        if line == "/new":
            messages = []
        elif task.name in ("sft", "dpo"):
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": stream_reply(model, tokenizer, messages)})
        else:
            _show(next(answer_rows(*loaded, [{"text": line}])))


def _show(row: dict[str, Any]) -> None:
    best = sorted(row["probs"].items(), key=lambda pair: -pair[1])[:3]
    out.print("  ".join(f"{name} {value:.3f}" for name, value in best), highlight=False, markup=False)


def register(app: typer.Typer) -> None:
    app.command("chat", help=EXAMPLES)(chat)
