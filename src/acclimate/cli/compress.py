"""`acclimate compress`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from acclimate.cli import calibration as calibrated
from acclimate.cli.common import DryRun, Json, Output, Overwrite, Quiet, Speaker, bytes_text, seconds_text

EXAMPLES = """
Make a language model smaller: its linear layers become low-rank, from calibration text alone, without fine-tuning.

**Examples**

```
acclimate compress smollm2 --ratio 0.2 -o smaller
acclimate compress my-model --ratio 0.3 --calibration notes.txt -o smaller
acclimate compress my-model --ratio 0.2 --calibration chats.jsonl --eval-data held-out.txt -o smaller --sequences 64 --seqlen 1024
acclimate compress my-model --ratio 0.2 --allocation energy --dense -o for-other-engines
acclimate compress my-model --ratio 0.2 --dry-run
```
"""


def compress(
    model: calibrated.Model,
    ratio: Annotated[float, typer.Option(help="Share of the layers' parameters to remove, between 0 and 1.")] = 0.2,
    calibration: calibrated.Calibration = None,
    eval_data: calibrated.EvalData = None,
    output: Output = None,
    sequences: calibrated.Sequences = 16,
    seqlen: calibrated.SequenceLength = 512,
    seed: calibrated.Seed = 0,
    refresh: Annotated[
        str, typer.Option(help="group: new statistics for each group of layers; block: for each block; none.")
    ] = "group",
    beta: Annotated[str, typer.Option(help="0 to 1: pull towards the original's outputs; or auto.")] = "0.5",
    allocation: Annotated[str, typer.Option(help="uniform or energy: how ranks are shared out.")] = "uniform",
    solver: Annotated[str, typer.Option(help="eigh, cholesky (faster) or qr.")] = "eigh",
    clip_norm: Annotated[
        float | None,
        typer.Option(help="0.995: shorten the inputs of tokens beyond this quantile.", show_default=False),
    ] = None,
    targets: calibrated.Targets = None,
    exclude: calibrated.Exclude = None,
    device: calibrated.Device = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="Write ordinary layers, for other engines; no smaller than before.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: calibrated.TrustRemoteCode = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.compress import files
    from acclimate.errors import InputError

    speaker = Speaker(as_json, quiet)
    names = calibrated.layers(targets, exclude)
    if not 0 < ratio < 1:
        raise InputError(f"--ratio is the share of parameters to remove, between 0 and 1, not {ratio:g}")
    calibrated.check_windows(sequences, seqlen)
    if dry_run:
        plan = calibrated.planned(
            model, trust_remote_code, speaker.show, lambda loaded: files.plan(loaded, ratio, **names)
        )
        table = Table("layer", "shape", "rank")
        for row in plan["layers"]:
            rank = "stays" if row["rank"] is None else str(row["rank"])
            table.add_row(row["name"], " x ".join(map(str, row["shape"])), rank)
        sizes = f"{bytes_text(plan['bytes_before'])} -> {bytes_text(plan['bytes_after'])}"
        speaker.result(plan, table, f"weights {sizes}, with uniform ranks")
        return
    if output is None:
        raise InputError("say where to write the compressed model: -o DIRECTORY")
    document = files.compress_model(
        model,
        output,
        ratio=ratio,
        calibration=calibration,
        evaluation=eval_data,
        sequences=sequences,
        seqlen=seqlen,
        seed=seed,
        dense=dense,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        show=speaker.show,
        refresh=refresh,
        beta=_beta(beta),
        allocation=allocation,
        solver=solver,
        clip_norm=clip_norm,
        device=device,
        **names,
    )
    table = Table("", "before", "after", "ratio")
    for label, key, text in (
        ("perplexity", "perplexity", "{:.2f}".format),
        ("parameters", "parameters", "{:,}".format),
        ("weights on disk", "bytes", bytes_text),
        (f"pass over {document['latency_tokens']} tokens", "latency", lambda s: f"{1000 * s:.0f} ms"),
    ):
        was, now = document[f"{key}_before"], document[f"{key}_after"]
        table.add_row(label, text(was), text(now), f"{now / was:.2f}")
    speaker.result(
        {"directory": str(output), **document},
        table,
        _by_kind(document["layers"]),
        f"{len(document['layers'])} layers in {seconds_text(document['seconds'])}",
        *(f"note: {text}" for text in document["warnings"]),
        f"wrote {output}",
        f"report  {output / 'report.html'}",
    )


def _by_kind(layers: list[dict[str, Any]]) -> Any:
    """A line for each kind of layer, such as q_proj: its ranks and the largest error among them."""
    from rich.table import Table

    table = Table("layers", "shape", "ranks", "largest error", "in block")
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in layers:
        kinds.setdefault((row["name"].rsplit(".", 1)[-1], " x ".join(map(str, row["shape"]))), []).append(row)
    for (kind, shape), rows in kinds.items():
        low, high = min(row["rank"] for row in rows), max(row["rank"] for row in rows)
        worst = max(rows, key=lambda row: row["error"] or 0.0)
        error = "-" if worst["error"] is None else f"{worst['error']:.3f}"
        table.add_row(kind, shape, str(low) if low == high else f"{low} to {high}", error, str(worst["block"]))
    return table


def _beta(text: str) -> float | str:
    from acclimate.errors import InputError

    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--beta is a number from 0 to 1, or auto, not '{text}'") from None


def register(app: typer.Typer) -> None:
    app.command("compress", help=EXAMPLES)(compress)
