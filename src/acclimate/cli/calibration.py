"""What `compress` and `quantize` share: the model, the text to calibrate and to measure on, which layers, and where."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(help="Embedded name, directory, GGUF file or hub id.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        "--calib",
        help="Text like that of your use: a .txt file, or rows with a column text. Default: a part of WikiText-2.",
        show_default=False,
    ),
]
EvalData = Annotated[
    str | None,
    typer.Option(
        help="Text to measure perplexity on. Default: the last tenth of the calibration text.", show_default=False
    ),
]
Sequences = Annotated[int, typer.Option(help="Windows of text to calibrate on, and to measure on.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens in a window.")]
Seed = Annotated[int, typer.Option(help="Of the places of the windows.")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="Only layers of this name. Several times.", show_default=False)
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="Not layers of this name. Several times.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="Where blocks are computed: cpu or cuda.", show_default=False)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that a hub repository ships.")]


def layers(targets: list[str] | None, exclude: list[str] | None) -> dict[str, Any]:
    """The arguments of --target and --exclude."""
    return {"targets": targets or "all-linear", "exclude": tuple(exclude or ()) or ("lm_head",)}


def check_windows(sequences: int, seqlen: int) -> None:
    """Raises InputError for windows that hold nothing to predict."""
    from acclimate.errors import InputError

    if sequences < 1 or seqlen < 2:
        raise InputError("--sequences is at least 1, and --seqlen at least 2")


def planned(model: str, trust_remote_code: bool, show: Any, plan: Any) -> dict[str, Any]:
    """`plan(model)` of the loaded model; what it cannot do is an InputError."""
    from acclimate.compress import files
    from acclimate.errors import InputError

    with TemporaryDirectory(prefix="acclimate-") as folder:
        loaded, _ = files.load(model, trust_remote_code, show, folder)
        try:
            found: dict[str, Any] = plan(loaded)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from error
    return found
