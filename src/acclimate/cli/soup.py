"""`acclimate soup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.common import DryRun, Json, Output, Overwrite, Quiet, Set, Speaker, bytes_text, seconds_text
from acclimate.cli.scoring import BaseModel, Evaluate, ScoredTask, recipe_fields, scores_shown

EXAMPLES = """
Make one fine-tuned checkpoint, or one LoRA adapter, more robust outside its training data. No data is needed.

**Examples**

```
acclimate soup base-model tuned-model -o robust-model
acclimate soup base-model tuned-model --dry-run
acclimate soup my-adapter -o robust-adapter
acclimate soup base.safetensors tuned.safetensors -o robust --exclude lm_head --report soup.json
acclimate soup base-model runs/full-tune -o robust-model --evaluate own --evaluate other=elsewhere.csv
```
"""


def soup(
    paths: Annotated[
        list[str], typer.Argument(metavar="BASE TUNED | ADAPTER", help="Two checkpoints, or one LoRA adapter.")
    ],
    output: Output = None,
    mode: Annotated[str, typer.Option(help="effective-rank or variance.")] = "effective-rank",
    energy: Annotated[float, typer.Option(help="variance: share of the squared norm kept as strong.")] = 0.8,
    include: Annotated[
        str | None, typer.Option(help="Edit only names that this regular expression finds.", show_default=False)
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="Keep names that this regular expression finds.", show_default=False)
    ] = None,
    solver: Annotated[str, typer.Option(help="auto, svd or gram.")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse tensors that BASE lacks.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the result: keep, float32, bfloat16, ..")] = "keep",
    jobs: Annotated[int, typer.Option(help="Tensors at once.")] = 1,
    overwrite: Overwrite = False,
    report: Annotated[Path | None, typer.Option(help="Also write the report here (JSON).", show_default=False)] = None,
    dry_run: DryRun = False,
    evaluate: Evaluate = None,
    model: BaseModel = None,
    task: ScoredTask = None,
    recipe_keys: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    from rich.table import Table

    from acclimate.errors import InputError
    from acclimate.merge import monosoup_adapter, monosoup_checkpoint
    from acclimate.merge.monosoup import SoupSettings
    from acclimate.merge_evaluation import (
        adapter_soup_systems,
        base_model,
        model_directory,
        read_rows,
        score,
        soup_systems,
        write_scores,
    )
    from acclimate.runs import write_text

    speaker = Speaker(as_json, quiet)
    _check_arguments(paths)
    settings: dict[str, Any] = {
        "mode": mode,
        "energy": energy,
        "include": include,
        "exclude": exclude,
        "solver": solver,
        "strict": strict,
        "device": device,
    }
    try:
        if dry_run:
            plan = _plan(paths, SoupSettings(**settings))
            table = Table("tensor", "shape", "what")
            for row in plan["tensors"]:
                table.add_row(row["name"], " x ".join(map(str, row["shape"])), row["what"])
            speaker.result(
                plan,
                table,
                *(f"note: {text}" for text in plan["warnings"]),
                f"about {bytes_text(plan['predicted_bytes'])} of memory beside the program",
            )
            return
        if output is None:
            raise InputError("say where to write the result: -o DIRECTORY")
        settings |= {
            "dtype": None if dtype == "keep" else dtype,
            "jobs": jobs,
            "overwrite": overwrite,
            "show": speaker.show,
        }
        if evaluate:  # wrong rows are told of before there is work to lose
            if len(paths) == 1:
                base = base_model(paths, model)
            else:
                base = str(model_directory(paths[0]))
                model_directory(paths[1])
            fields = recipe_fields(task, recipe_keys)
            rows = read_rows(evaluate, [paths[-1]] * len(evaluate), base, fields)
        if len(paths) == 1:
            result = monosoup_adapter(paths[0], output, **settings)
        else:
            result = monosoup_checkpoint(paths[0], paths[1], output, **settings)
        scores = None
        if evaluate:
            one = len(paths) == 1
            systems = adapter_soup_systems(paths[0], output, base) if one else soup_systems(paths[0], paths[1], output)
            scores = score(systems, rows, "soup", speaker.show)
            write_scores(scores, output)
    except ValueError as error:
        raise InputError(str(error)) from error
    if report is not None:
        write_text(report, result.to_json() + "\n")
    totals = result.totals
    table = Table("tensors", "edited", "weight of the weak part", "energy of the strong part", "time")
    table.add_row(
        str(totals["tensors"]),
        str(totals["edited"]),
        "-" if totals["lambda_low"] is None else f"{totals['lambda_low']:.3f}",
        "-" if totals["energy"] is None else f"{totals['energy']:.1%}",
        seconds_text(totals["seconds"]),
    )
    speaker.result(
        {"directory": result.directory, "totals": totals, "warnings": result.warnings, "tensors": result.tensors}
        | ({"scores": scores} if scores else {}),
        table,
        *(f"note: {text}" for text in result.warnings),
        *(scores_shown(scores, output) if scores else ()),
        f"wrote {output}",
    )


def _check_arguments(paths: list[str]) -> None:
    from acclimate.errors import InputError

    adapters = [
        path for path in paths if any((Path(path, *sub, "adapter_config.json")).exists() for sub in ((), ("adapter",)))
    ]
    if len(paths) > 2:
        raise InputError(
            f"soup takes BASE and TUNED, or one adapter, not {len(paths)} paths. For many adapters: acclimate merge"
        )
    if len(paths) == 2 and adapters:
        raise InputError(f"'{adapters[0]}' is an adapter, which needs no base: acclimate soup {adapters[0]} -o OUT")
    if len(paths) == 1 and not adapters and Path(paths[0]).exists():
        raise InputError(
            f"'{paths[0]}' is no adapter. For a whole checkpoint name its base first: acclimate soup BASE {paths[0]} -o OUT"
        )


def _plan(paths: list[str], settings: Any) -> dict[str, Any]:
    import torch

    from acclimate.merge.monosoup import plan_soup
    from acclimate.merge.soup_files import open_lora

    if len(paths) == 1:
        _, modules, extras = open_lora(paths[0], settings)
        rows: list[dict[str, Any]] = [
            {
                "name": module.name,
                "shape": [module.b_head, module.n],
                "what": "edit" if settings.wants(module.name) else "left out by name",
            }
            for module in modules
        ]
        rows += [{"name": name, "shape": [], "what": "not a low-rank pair"} for name in extras]
        largest = max(module.columns * (module.b_head + module.n) for module in modules)
        return {"tensors": rows, "warnings": [], "predicted_bytes": 4 * 8 * largest}
    plan = plan_soup(paths[0], paths[1], settings)
    rows = [
        {"name": names[0], "shape": list(plan.tuned.shapes[names[0]]), "what": reason or "edit"}
        for names, _, reason in plan.items
    ]
    largest = max(torch.Size(shape).numel() for shape in plan.tuned.shapes.values())
    return {"tensors": rows, "warnings": plan.warnings, "predicted_bytes": 4 * 8 * largest}


def register(app: typer.Typer) -> None:
    app.command("soup", help=EXAMPLES)(soup)
