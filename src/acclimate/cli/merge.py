"""`acclimate merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import DryRun, Json, Output, Overwrite, Quiet, Set, Speaker, bytes_text, seconds_text
from acclimate.cli.scoring import BaseModel, Evaluate, ScoredTask, recipe_fields, scores_shown

EXAMPLES = """
Merge LoRA adapters of one base model into one ordinary LoRA adapter. The base model is not needed.

**Examples**

```
acclimate merge banking travel home -o all-three
acclimate merge a b -o ab --rule ties --density 0.2 --weights 1,0.5 --rank 32
acclimate merge a b -o ab --rank auto:0.95 --report ab.json
acclimate merge a b --dry-run
acclimate merge a b --compare-basis
acclimate merge runs/a runs/b -o ab --evaluate own --evaluate own
acclimate merge a b -o ab --evaluate banking.csv --evaluate travel=trips.csv --task choice
```
"""


def merge(
    adapters: Annotated[list[str], typer.Argument(help="PEFT adapter directories, or runs of acclimate.")],
    output: Output = None,
    rule: Annotated[str, typer.Option(help="tsv, sum, mean, ties, dare, dare_ties, iso or tsv_iso.")] = "tsv",
    rank: Annotated[
        str | None,
        typer.Option(
            help="Rank of the result: a number, or auto:0.95. Default: the inputs' largest.", show_default=False
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="A number an adapter, e.g. 1,0.5. Default: 1.", show_default=False)
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor of the merged change.")] = 1.0,
    density: Annotated[float, typer.Option(help="ties: share of entries kept.")] = 0.3,
    drop: Annotated[float, typer.Option(help="dare: share of entries dropped.")] = 0.3,
    sign: Annotated[str, typer.Option(help="ties: total or frequency.")] = "total",
    sketch: Annotated[float, typer.Option(help="Rows of the sketch per column.")] = 4.0,
    refine: Annotated[
        int | None,
        typer.Option(help="0 or 1: a second step for the bases. Default: where the rule needs it.", show_default=False),
    ] = None,
    space: Annotated[str, typer.Option(help="core, or sketch (for study).")] = "core",
    basis: Annotated[str, typer.Option(help="auto, circulant, gram or svd.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the sketch and of dare.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Of the result. Default: the inputs' widest.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Batches of layers at once.")] = 1,
    modules_to_save: Annotated[str, typer.Option(help="Trained heads: mean, first, error or drop.")] = "mean",
    allow_different_base: Annotated[
        bool, typer.Option("--allow-different-base", help="The base models have different names but are the same.")
    ] = False,
    overwrite: Overwrite = False,
    report: Annotated[Path | None, typer.Option(help="Also write the report here (JSON).", show_default=False)] = None,
    dry_run: DryRun = False,
    compare_basis: Annotated[
        bool, typer.Option("--compare-basis", help="Merge with every basis, and write nothing but their times.")
    ] = False,
    evaluate: Evaluate = None,
    model: BaseModel = None,
    task: ScoredTask = None,
    recipe_keys: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.errors import InputError
    from acclimate.merge import compare_bases, merge_adapters, plan_merge
    from acclimate.merge_evaluation import base_model, merge_systems, read_rows, score, write_scores
    from acclimate.runs import write_text

    speaker = Speaker(as_json, quiet)
    try:
        settings: dict[str, Any] = {
            "rule": rule,
            "rank": int(rank) if rank is not None and rank.lstrip("-").isdigit() else rank,
            "weights": None if weights is None else _numbers(weights),
            "scale": scale,
            "density": density,
            "drop": drop,
            "sign": sign,
            "sketch": sketch,
            "refine": refine,
            "space": space,
            "basis": basis,
            "seed": seed,
            "dtype": dtype,
            "device": device,
            "jobs": jobs,
            "modules_to_save": modules_to_save,
            "allow_different_base": allow_different_base,
        }
        if dry_run:
            plan = plan_merge(adapters, **settings).to_dict()
            table = Table("layer", "shape", "ranks")
            for module in plan["modules"]:
                table.add_row(
                    module["name"], " x ".join(map(str, module["shape"])), ", ".join(map(str, module["ranks"]))
                )
            speaker.result(
                plan,
                table,
                f"rank of the result: {plan['rank']}, {plan['dtype']}; other tensors: {len(plan['other_tensors'])}",
                f"about {seconds_text(plan['predicted_seconds'])} on one core, "
                f"{bytes_text(plan['predicted_bytes'])} of memory beside the program",
            )
            return
        if compare_basis:
            rows = compare_bases(plan_merge(adapters, **settings), speaker.show)
            table = Table("basis", "seconds", "distance from svd")
            for row in rows:
                table.add_row(row["basis"], f"{row['seconds']:.3f}", f"{row['distance']:.1e}")
            speaker.result(rows, table)
            return
        if output is None:
            raise InputError("say where to write the merged adapter: -o DIRECTORY")
        if evaluate:  # wrong rows are told of before there is work to lose
            if len(evaluate) != len(adapters):
                raise InputError(
                    f"there are {len(adapters)} adapters and {len(evaluate)} sets of rows: give --evaluate once for each adapter, in "
                    "their order"
                )
            base = base_model(adapters, model)
            scored = read_rows(evaluate, adapters, base, recipe_fields(task, recipe_keys))
        result = merge_adapters(adapters, output, overwrite=overwrite, show=speaker.show, **settings)
        scores = None
        if evaluate:
            options = {key: settings[key] for key in ("weights", "device", "modules_to_save", "allow_different_base")}
            scores = score(merge_systems(adapters, output, base, rule, **options), scored, "merge", speaker.show)
            write_scores(scores, output)
    except ValueError as error:
        raise InputError(str(error)) from error
    if report is not None:
        write_text(report, result.to_json() + "\n")
    totals = result.totals
    table = Table("layers", "rank", "energy kept", "effective rank: inputs", "merged", "written", "basis", "time")
    table.add_row(
        str(totals["modules"]),
        str(totals["rank"]),
        f"{totals['energy']:.1%}",
        f"{totals['erank_in']:.1f}",
        f"{totals['erank_merged']:.1f}",
        f"{totals['erank_out']:.1f}",
        ", ".join(totals["basis"]),
        seconds_text(totals["seconds"]),
    )
    speaker.result(
        {"directory": result.directory, "totals": totals, "warnings": result.warnings, "modules": result.modules}
        | ({"scores": scores} if scores else {}),
        table,
        *(f"note: {text}" for text in result.warnings),
        *(scores_shown(scores, output) if scores else ()),
        f"wrote {output}",
    )


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights takes numbers with commas between them, not '{text}'") from None


def register(app: typer.Typer) -> None:
    app.command("merge", help=EXAMPLES)(merge)
