"""`acclimate quantize`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from acclimate.cli import calibration as calibrated
from acclimate.cli.common import DryRun, Json, Output, Overwrite, Quiet, Speaker, bytes_text, seconds_text

EXAMPLES = """
Quantise a language model to 2, 3, 4 or 8 bits, with a LoRA adapter that carries what it can of the error and goes on training.

**Examples**

```
acclimate quantize smollm2 --bits 3 -o small
acclimate quantize my-model --bits 3 --adapter-rank 16 --calibration notes.txt -o small
acclimate quantize my-model --bits 4 --group-size 128 --format compressed-tensors -o for-vllm
acclimate quantize my-model --bits 3 --dry-run
acclimate tune --model small --data chats.jsonl --task sft
```
"""


def quantize(
    model: calibrated.Model,
    bits: Annotated[int, typer.Option(help="Bits of a weight: 2, 3, 4 or 8.")] = 3,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; -1: all of a row.")] = 64,
    rank: Annotated[
        int | None,
        typer.Option(
            "--adapter-rank", "--rank", help="Of the adapter. Default: 16; 64 for wide layers.", show_default=False
        ),
    ] = None,
    calibration: calibrated.Calibration = None,
    eval_data: calibrated.EvalData = None,
    output: Output = None,
    format: Annotated[
        str, typer.Option(help="acclimate; gptq or compressed-tensors (4 and 8 bits), for other engines; or dense.")
    ] = "acclimate",
    sequences: calibrated.Sequences = 16,
    seqlen: calibrated.SequenceLength = 512,
    seed: calibrated.Seed = 0,
    iterations: Annotated[int, typer.Option(help="Most rounds of projecting.")] = 5,
    kappa: Annotated[float, typer.Option(help="What an error counts that the adapter carries, 0 to 1.")] = 0.1,
    sym: Annotated[bool, typer.Option("--sym", help="Zero in the middle of the codes.")] = False,
    desc_act: Annotated[bool, typer.Option("--desc-act", help="Round the inputs that vary most first.")] = False,
    mse_clip: Annotated[bool, typer.Option("--mse-clip", help="Also try narrower ranges.")] = False,
    stream: Annotated[
        str, typer.Option(help="What layers above see: quantised+adapter, quantised or original.")
    ] = "quantised+adapter",
    method: Annotated[str, typer.Option(help="projq; gptq, rtn or loftq, to compare with.")] = "projq",
    targets: calibrated.Targets = None,
    exclude: calibrated.Exclude = None,
    device: calibrated.Device = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: calibrated.TrustRemoteCode = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.compress import quantize_files
    from acclimate.errors import InputError

    speaker = Speaker(as_json, quiet)
    calibrated.check_windows(sequences, seqlen)
    options: dict[str, Any] = {
        "iterations": iterations, "kappa": kappa, "sym": sym, "desc_act": desc_act, "mse_clip": mse_clip, "stream": stream,
        "method": method, **calibrated.layers(targets, exclude),
    }  # fmt: skip
    if dry_run:
        plan = calibrated.planned(
            model,
            trust_remote_code,
            speaker.show,
            lambda loaded: quantize_files.plan(loaded, bits, group_size, rank, options),
        )
        table = Table("layer", "shape")
        for row in plan["layers"]:
            table.add_row(row["name"], " x ".join(map(str, row["shape"])))
        speaker.result(
            plan,
            table,
            f"weights {bytes_text(plan['bytes_before'])} -> {bytes_text(plan['bytes_after'])}, "
            f"{plan['bits_per_weight']['total']:.2f} bits a weight with an adapter of rank {plan['rank']}",
        )
        return
    if output is None:
        raise InputError("say where to write the quantised model: -o DIRECTORY")
    document = quantize_files.quantize_model(
        model,
        output,
        bits=bits,
        group_size=group_size,
        rank=rank,
        format=format,  # type: ignore[arg-type]
        calibration=calibration,
        evaluation=eval_data,
        sequences=sequences,
        seqlen=seqlen,
        seed=seed,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        show=speaker.show,
        device=device,
        **options,
    )
    spent = document["bits_per_weight"]
    table = Table("", "bits a weight", "perplexity")
    for label, known, key in (
        ("original", None, "perplexity_before"),
        ("quantised", spent["total"] - spent["adapter"], "perplexity_quantised"),
        (f"with its adapter, rank {document['settings']['comp_rank']}", spent["total"], "perplexity_after"),
    ):
        table.add_row(label, "" if known is None else f"{known:.2f}", f"{document[key]:.2f}")
    ratios = [row["ratio"] for row in document["layers"]]
    speaker.result(
        {"directory": str(output), **document},
        table,
        f"error beyond the adapter: {sum(ratios) / len(ratios):.2f} of GPTQ's on average, {max(ratios):.2f} at most",
        f"weights on disk {bytes_text(document['bytes_before'])} -> {bytes_text(document['bytes_after'])}",
        f"{len(document['layers'])} layers in {seconds_text(document['seconds'])}",
        *(f"note: {text}" for text in document["warnings"]),
        f"wrote {output}",
        f"report  {output / 'report.html'}",
        *([f"go on   acclimate tune --model {output} --data FILE"] if format in ("acclimate", "dense") else []),
    )


def register(app: typer.Typer) -> None:
    app.command("quantize", help=EXAMPLES)(quantize)
