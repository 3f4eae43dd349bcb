"""What the verbs share: the app, the common options, output and errors."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from acclimate.errors import AcclimateError

app = typer.Typer(
    name="acclimate",
    help="Adapt models you already have to the task you face, and prove on your data whether it helped.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Newer Typers carry their own copy of click, older ones import it: either way this is the base of a wrong command line.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Directory to write to.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at -o.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any recipe key, e.g. `train.lr=1e-3`. May be given several times.", show_default=False),
]


def speaks() -> bool:
    """Under accelerate launch only the first process speaks; it alone has written the files."""
    return os.environ.get("RANK", "0") == "0"


@dataclass
class Speaker:
    """Where a verb's output goes: tables for people on stdout, or one JSON document, or nothing."""

    as_json: bool
    quiet: bool

    @property
    def show(self) -> Any:
        from acclimate.show import Silent, Terminal

        return Silent() if self.quiet or self.as_json or not speaks() else Terminal(err)

    def result(self, document: Any, *renderables: Any) -> None:
        if self.as_json:
            typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        elif not self.quiet:
            for item in renderables:
                if isinstance(item, str):  # plain text: brackets are not markup, and a path that wraps cannot be copied
                    out.print(item, markup=False, highlight=False, soft_wrap=True)
                else:
                    out.print(item)


def run_app(arguments: list[str]) -> int:
    """Run a command and turn what goes wrong into one message and an exit code."""
    _calm_libraries()
    from acclimate.cli import (
        bench,
        chat,
        compare,
        compress,
        doctor,
        evaluate,
        export,
        merge,
        methods,
        models,
        predict,
        quantize,
        soup,
        tune,
    )

    for module in (
        tune,
        evaluate,
        predict,
        chat,
        compare,
        export,
        merge,
        soup,
        compress,
        quantize,
        methods,
        bench,
        models,
        doctor,
    ):
        module.register(app)
    try:
        code = app(arguments, standalone_mode=False)
        if code == 130:  # what Typer makes of a Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except AcclimateError as error:
        label = "interrupted" if error.exit_code == 130 else "error"
        err.print(f"[bold red]{label}:[/bold red] ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        err.print("interrupted; what was finished is kept")
        return 130
    except _UsageError as error:
        error.show()
        return 2
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `acclimate predict ... | head`
        return 0
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """A full disk or a missing permission can surface anywhere; everything else is a bug and keeps its traceback."""
    from acclimate.runs import storage_errors

    try:
        with storage_errors(Path.cwd()):
            raise error
    except AcclimateError as known:
        err.print(f"error: {known}", markup=False, highlight=False, soft_wrap=True)
        return known.exit_code
    except Exception:
        err.print_exception()
        err.print("This is a bug in acclimate. Please report it with the lines above and `acclimate doctor --json`.")
        return 1


def _calm_libraries() -> None:
    """Libraries' chatter would drown our output; what matters to the user is said by us, in words that name a remedy."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore")
    for name in ("transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def metric_text(entry: dict[str, Any]) -> str:
    """`0.720 (0.681 to 0.758)`, or the value alone where there is no interval."""
    if entry.get("low") is None:
        return f"{entry['value']:.3f}"
    return f"{entry['value']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def bytes_text(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def seconds_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {rest:02d} s" if minutes else f"{seconds:.1f} s"
