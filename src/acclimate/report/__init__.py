"""report.html: one page that says what was done and whether it helped, from the files of a run or a comparison.

The page needs nothing but itself: no script, no other file, no network. It opens from disk, on a phone, in light and
dark. Whatever comes from data is escaped. The same files give the same bytes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from acclimate import runs
from acclimate.errors import InputError
from acclimate.metrics.calibration import HIGHER_IS_BETTER
from acclimate.report import numbers
from acclimate.report.examples import instructive

Json = dict[str, Any]

LABELS = {
    "accuracy": "Accuracy",
    "macro_f1": "Macro F1",
    "nll": "NLL (nats)",
    "perplexity": "Perplexity",
    "ece": "ECE",
    "adaptive_ece": "Adaptive ECE",
    "brier": "Brier score",
    "margin": "Margin (nats)",
    "token_accuracy": "Token accuracy",
    "epistemic": "Epistemic uncertainty (nats)",
    "aleatoric": "Aleatoric uncertainty (nats)",
}
HIGHER = {**HIGHER_IS_BETTER, "margin": True, "token_accuracy": True}
# What the headline shows: the first of these that was measured.
HEADLINE = ("accuracy", "perplexity", "nll")

DATA_LABELS = {
    "source": "Source",
    "train_rows": "Training rows",
    "eval_rows": "Evaluation rows",
    "skipped": "Rows skipped",
    "truncated_train": "Training rows cut to the length limit",
    "truncated_eval": "Evaluation rows cut to the length limit",
    "overlap": "Evaluation rows that are also in the training data",
    "duplicates": "Duplicate rows in the training data",
}


def write_report(directory: Path) -> Path:
    """Write `directory`/report.html and return its path.

    The directory is a comparison (has compare.json), a run (run.json), a bare evaluation (evaluation.json), a merge or soup
    with scores (scores.json), a compression (compression.json) or a quantisation (quantization.json). Optional files that are absent leave their section out
    with a sentence that says so. Only files in `directory` are read. The page is written to a temporary name and renamed,
    so a reader never sees half of it.

    Raises:
        InputError: none of these files is there, or one of them is not valid JSON.
    """
    directory = Path(directory)
    page = render(directory)
    target = directory / "report.html"
    runs.write_text(target, page)
    return target


def render(directory: Path) -> str:
    """The page of `directory` as HTML text. Raises InputError as `write_report` does."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    if (directory / "compare.json").is_file():
        template, context = "comparison.html.j2", _comparison(directory)
    elif (directory / "run.json").is_file() or (directory / "evaluation.json").is_file():
        template, context = "run.html.j2", _run(directory)
    elif (directory / "scores.json").is_file():
        template, context = "merge.html.j2", _merge(directory)
    elif (directory / "compression.json").is_file():
        template, context = "compress.html.j2", _compression(directory)
    elif (directory / "quantization.json").is_file():
        template, context = "quantize.html.j2", _quantization(directory)
    else:
        raise InputError(
            f"{directory} has no compare.json, run.json, evaluation.json, scores.json, compression.json or quantization.json, so there is "
            "nothing to report. Give the directory of a run, a comparison, an evaluation, a merge with --evaluate, a compression or a "
            "quantisation."
        )
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=numbers.number,
        signed=numbers.signed,
        interval=numbers.interval,
        p_value=numbers.p_value,
        size=numbers.size,
        count=numbers.count,
        duration=numbers.duration,
        metric=_metric_name,
        # Plots are ours: matplotlib has escaped the text inside, and `plots._svg` the description.
        svg=Markup,
    )
    return environment.get_template(template).render(**context)


def _run(directory: Path) -> Json:
    """What run.html.j2 shows of a run or a bare evaluation."""
    from acclimate.report import plots

    run = _read_json(directory / "run.json") or {}
    evaluation = _read_json(directory / "evaluation.json")
    rows, after_rows, before_rows = (
        _read_jsonl(directory / name) for name in ("metrics.jsonl", "predictions.jsonl", "predictions_before.jsonl")
    )
    scores = evaluation or {}
    before, after = scores.get("before"), scores.get("after")
    sampled = (after or {}).get("sampled")  # the same model, its predictions averaged over draws of its weights
    differences = scores.get("differences") or {}
    recipe = directory / "recipe.yaml"
    timings = [(name, seconds) for name, seconds in (run.get("timings") or {}).items() if seconds is not None]
    reliability = [
        {"svg": plots.reliability(entry["reliability"], title), "ece": (entry["metrics"].get("ece") or {}).get("value")}
        for title, entry in (
            ("Before", before),
            ("After" if sampled is None else "Posterior mean", after),
            (_draws(sampled) or "", sampled),
        )
        if entry and entry.get("reliability")
    ]
    return {
        "title": run.get("name") or directory.resolve().name,
        "kind": "run" if run else "evaluation",
        "run": run,
        "when": _when(run.get("created")),
        "lead": _lead(run, scores),
        "headline": _headline(before, after, differences),
        "has_evaluation": evaluation is not None,
        "before": before,
        "after": after,
        "sampled": _draws(sampled),
        "metric_rows": _metric_rows(before, after, differences),
        "definition": (after or before or {}).get("definition"),
        "loss": plots.loss_curve(rows) if rows else None,
        "has_metrics": rows is not None,
        "start": _start(_read_json(directory / "init.json")),
        "optimizer": _optimizer(_read_json(directory / "optimizer.json")),
        "reliability": reliability,
        "classes": _classes(before, after),
        "examples": instructive(after_rows, before_rows or []) if after_rows else [],
        "has_predictions": after_rows is not None,
        "has_predictions_before": before_rows is not None,
        "timings": plots.bars(timings, "time", unit="seconds") if timings else None,
        "cost": _cost(run, scores),
        "data": _facts((DATA_LABELS.get(key, _plain(key)), value) for key, value in (run.get("data") or {}).items()),
        "warnings": run.get("warnings") or [],
        "provenance": _provenance(run),
        "recipe": recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
    }


def _start(init: Json | None) -> Json | None:
    """What is shown of a start that was found by looking at the data."""
    from acclimate.report import plots

    if not init or not init.get("layers"):
        return None
    layers = init["layers"]
    if init["method"] == "principal":
        shares = [layer["kept"] for layer in layers]
        known = {
            "Layers": f"{len(layers)}",
            "Time": numbers.duration(init["seconds"]),
            "Share of the outputs' energy in the adapter, median": numbers.number(statistics.median(shares)),
        }
        about = "The share of each layer's output energy on this data that the adapter starts with, and the base without it lacks."
        drawn = plots.by_block(
            layers, {"kept": "share of outputs"}, f"Share that the start holds in {len(layers)} layers", share=True
        )
        return {"svg": drawn, "facts": _facts(known.items()), "about": about}

    def median(key: str) -> str:
        known = [layer[key] for layer in layers if layer[key] is not None]
        return numbers.number(statistics.median(known)) if known else "not known (sketched)"

    facts = {
        "Layers": f"{len(layers)}"
        + (f", and {len(init['skipped'])} that the loss does not reach" if init["skipped"] else ""),
        "Positions looked at": numbers.count(int(layers[0]["positions"])),
        "Time": numbers.duration(init["seconds"]),
        "Settings": ", ".join(f"{key} {value}" for key, value in init["settings"].items() if value is not None),
        "Effective rank of the inputs, median": median("effective_rank_inputs"),
        "Effective rank of the outputs, median": median("effective_rank_outputs"),
        "Overlap with EVA's input directions, median": median("overlap_eva"),
        "Overlap with PiSSA's input directions, median": median("overlap_pissa"),
    }
    about = (
        "The share of each layer's Fisher energy that its leading directions hold: near 1, the rank covers almost all that the "
        "predictions on this data depend on."
    )
    return {"svg": plots.energy_of_start(layers), "facts": _facts(facts.items()), "about": about}


def _optimizer(document: Json | None) -> Json | None:
    """What is shown of what an optimiser says about itself: `title`, and if it has them `notes` (sentences), `tables` (title, columns,
    rows) and `plots` (title, x, y, log, series: points by name)."""
    from acclimate.report import plots

    if not document:
        return None
    drawn = [
        {"title": plot["title"], "svg": plots.lines(plot["series"], plot["x"], plot["y"], plot.get("log", False))}
        for plot in document.get("plots", [])
    ]
    return {
        "title": document["title"],
        "notes": document.get("notes", []),
        "tables": document.get("tables", []),
        "plots": [plot for plot in drawn if plot["svg"]],
    }


def _comparison(directory: Path) -> Json:
    """What comparison.html.j2 shows."""
    from acclimate.report import plots

    compare = _read_json(directory / "compare.json") or {}
    metric, cells, base = compare["metric"], compare.get("cells") or [], compare.get("base")
    higher = compare.get("higher_is_better", HIGHER.get(metric, True))
    label = _metric_name(metric)

    def score(system: Json) -> Json:
        return (system.get("metrics") or {}).get(metric) or {}

    scored = [system for system in [*cells, *([base] if base else [])] if score(system).get("value") is not None]
    scored.sort(key=lambda system: score(system)["value"] if not higher else -score(system)["value"])
    unscored = [cell for cell in cells if score(cell).get("value") is None]
    against = []
    for key, title, unit in (
        ("trainable", "trainable parameters", ""),
        ("seconds_per_step", "time per step", "seconds"),
        ("peak_memory_bytes", "peak memory", "bytes"),
    ):
        points = [{"name": cell["name"], "x": cell.get(key), **score(cell)} for cell in cells]
        svg = plots.quality_against(points, title, label, base=score(base).get("value") if base else None, unit=unit)
        against.append({"title": title, "svg": svg})
    seen = dict.fromkeys(name for system in scored for name in system["metrics"])
    columns = [*(name for name in HIGHER if name in seen), *(name for name in seen if name not in HIGHER)]
    columns.sort(key=lambda name: name != metric)
    return {
        "title": compare.get("name") or directory.resolve().name,
        "compare": compare,
        "metric": metric,
        "lead": _comparison_lead(compare),
        "columns": [{"name": name, "label": _metric_name(name), "hint": _hint(name)} for name in columns],
        "systems": scored,
        "unscored": unscored,
        "base_name": base["name"] if base else None,
        "leaderboard": plots.evidence_plot(
            [(s["name"], score(s)["value"], score(s).get("low"), score(s).get("high")) for s in scored], label
        )
        if scored
        else None,
        "against": [item for item in against if item["svg"]],
        "without": [item["title"] for item in against if not item["svg"]],
        "loss": plots.loss_curves(
            {cell["name"]: [run.get("loss") or [] for run in cell.get("runs") or []] for cell in cells}
        ),
        "reliability": [plots.reliability(s["reliability"], s["name"]) for s in scored if s.get("reliability")],
        "differences": compare.get("differences") or [],
        "runs": [
            {
                "cell": cell["name"],
                "seed": run.get("seed"),
                "status": run.get("status"),
                "value": (run.get("metrics") or {}).get(metric),
                # "./" keeps a path from being read as a URL with a scheme.
                "href": f"./{quote(run['path'])}/report.html" if run.get("path") else None,
                "path": run.get("path"),
            }
            for cell in cells
            for run in cell.get("runs") or []
        ],
    }


def _merge(directory: Path) -> Json:
    """What merge.html.j2 shows of a merge or a soup that was scored."""
    from acclimate.report import plots

    document = _read_json(directory / "scores.json") or {}
    return {
        "title": directory.resolve().name,
        "document": document,
        "reference": next(system["name"] for system in document["systems"] if system["role"] == "reference"),
        "lower": any(not part["higher_is_better"] for part in document["rows"]),
        "kept": plots.kept(document["systems"]),
    }


def _compression(directory: Path) -> Json:
    """What compress.html.j2 shows of a compressed model."""
    from acclimate.report import plots

    document = _read_json(directory / "compression.json") or {}
    layers, blocks = document["layers"], document["blocks"]
    depth = [{"name": f".{row['block']}.output of the block", **row} for row in blocks]
    settings = {key: value for key, value in document["settings"].items() if value is not None}
    return {
        "title": directory.resolve().name.removeprefix(runs.PARTIAL),
        "document": document,
        "depth": plots.by_block(
            depth, {"error": "relative error"}, f"Error of the hidden states after each of {len(blocks)} blocks"
        ),
        "errors": plots.by_block(
            layers,
            {"error": "error", "inherited": "inherited", "local": "dropped"},
            f"Errors of {len(layers)} layers against the block",
        )
        if layers
        else None,
        "ranks": plots.by_block(layers, {"rank": "rank"}, f"Ranks of {len(layers)} layers against the block")
        if layers
        else None,
        "settings": _facts((_plain(key), value) for key, value in settings.items()),
    }


def _quantization(directory: Path) -> Json:
    """What quantize.html.j2 shows of a quantised model."""
    from acclimate.report import plots

    document = _read_json(directory / "quantization.json") or {}
    layers, blocks = document["layers"], document["blocks"]
    depth = [{"name": f".{row['block']}.output of the block", **row} for row in blocks]
    settings = {key: value for key, value in document["settings"].items() if value is not None}
    ratios = [row["ratio"] for row in layers]
    return {
        "title": directory.resolve().name.removeprefix(runs.PARTIAL),
        "document": document,
        "mean_ratio": statistics.fmean(ratios),
        "depth": plots.by_block(
            depth, {"error": "relative error"}, f"Error of the hidden states after each of {len(blocks)} blocks"
        ),
        "ratios": plots.by_block(
            layers,
            {"ratio": "J over GPTQ's", "share": "share in adapter"},
            f"What no adapter can carry, over GPTQ's, and the adapter's share, of {len(layers)} layers against the block",
        ),
        "errors": plots.by_block(
            layers,
            {"error_quantised": "without adapter", "error_corrected": "with adapter"},
            f"Errors of {len(layers)} layers against the block, without and with the adapter",
        ),
        "settings": _facts((_plain(key), value) for key, value in settings.items()),
    }


def _lead(run: Json, scores: Json) -> str:
    """One sentence: what was done, on how much, and scored on what."""
    method, data = run.get("method") or {}, run.get("data") or {}
    scored_rows = (scores.get("after") or {}).get("n") or data.get("eval_rows")
    parts = []
    if run:
        what = f"{run.get('model') or 'The model'}{' with ' + method['adapter'] if method.get('adapter') else ''}"
        extras = ", ".join(
            f"{name} {method[key]}"
            for key, name in (("init", "initialised by"), ("optimizer", "optimiser"))
            if method.get(key)
        )
        parts.append(what + (f" ({extras})" if extras else ""))
        if data.get("train_rows") is not None:
            parts.append(f"trained on {numbers.count(data['train_rows'])} rows")
        if run.get("steps") is not None:
            parts.append(f"for {numbers.count(run['steps'])} steps")
    task = scores.get("task") or method.get("task")
    if scored_rows is not None:
        scored = f"scored on {numbers.count(scored_rows)} rows" + (f" of the task “{task}”" if task else "")
        sentence = f"{' '.join(parts)}; {scored}" if parts else scored[0].upper() + scored[1:]
    else:
        sentence = " ".join(parts)
    return f"{sentence}." if sentence else ""


def _comparison_lead(compare: Json) -> str:
    seeds, cells = compare.get("seeds") or [], compare.get("cells") or []
    parts = [f"{numbers.count(len(cells))} {'method' if len(cells) == 1 else 'methods'}"]
    if seeds:
        parts.append(f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} each")
    if compare.get("budget"):
        parts.append(f"an equal budget of {compare['budget']}")
    if compare.get("n_examples") is not None:
        parts.append(f"scored on the same {numbers.count(compare['n_examples'])} rows")
    return ", ".join(parts) + "."


def _headline(before: Json | None, after: Json | None, differences: Json) -> Json | None:
    """The metric the page opens with, its values and what can be said of them."""
    measured = (after or before or {}).get("metrics") or {}
    order = [*HEADLINE, *measured]
    name = next((m for m in order if m in measured and m in differences), None)
    name = name or next((m for m in order if m in measured), None)
    if name is None:
        return None
    return {
        "name": name,
        "hint": _hint(name),
        "before": ((before or {}).get("metrics") or {}).get(name),
        "after": ((after or {}).get("metrics") or {}).get(name),
        "difference": differences.get(name),
    }


def _draws(sampled: Json | None) -> str | None:
    return f"Average of {numbers.count(sampled['draws'])} draws" if sampled else None


def _metric_rows(before: Json | None, after: Json | None, differences: Json) -> list[Json]:
    sampled = (after or {}).get("sampled")
    then, now, drawn = ((entry or {}).get("metrics") or {} for entry in (before, after, sampled))
    names = list(dict.fromkeys([*now, *then, *drawn]))
    return [
        {
            "name": name,
            "hint": _hint(name),
            "before": then.get(name),
            "after": now.get(name),
            "sampled": drawn.get(name),
            "difference": differences.get(name),
        }
        for name in names
    ]


def _classes(before: Json | None, after: Json | None) -> Json | None:
    """Accuracy of each class now and before, the worst now first; ties by name."""
    now = (after or {}).get("per_class")
    if not now:
        return None
    then = {row["class"]: row["accuracy"] for row in (before or {}).get("per_class") or []}
    rows = [{**row, "before": then.get(row["class"])} for row in now if row.get("accuracy") is not None]
    rows.sort(key=lambda row: (row["accuracy"], str(row["class"])))
    return {"rows": rows[:15], "total": len(rows), "has_before": bool(then)}


def _cost(run: Json, scores: Json) -> list[tuple[str, str]]:
    parameters = run.get("parameters") or {}
    trainable, total = parameters.get("trainable"), parameters.get("total")
    facts = [
        ("Trained parameters", None if trainable is None else numbers.count(trainable)),
        ("Of all parameters", None if not total else numbers.count(total)),
        ("Share trained", None if not total or trainable is None else numbers.percent(trainable / total)),
        ("Peak memory", _if_known(run.get("peak_memory_bytes"), numbers.size)),
        ("Size of the adapter", _if_known(run.get("adapter_bytes"), numbers.size)),
        ("Steps", _if_known(run.get("steps"), numbers.count)),
        ("Time per step", _if_known(run.get("seconds_per_step"), numbers.duration)),
        ("Tokens trained on", _if_known(run.get("tokens"), numbers.count)),
        ("Total time", _if_known(sum(t for t in (run.get("timings") or {}).values() if t) or None, numbers.duration)),
        ("Time to score", _if_known((scores.get("after") or {}).get("seconds"), numbers.duration) if not run else None),
    ]
    return [(name, value) for name, value in facts if value is not None]


def _provenance(run: Json) -> list[tuple[str, str]]:
    git, hardware = run.get("git"), run.get("hardware") or {}
    commit = f"{git['commit']}{', with uncommitted changes' if git.get('dirty') else ''}" if git else None
    gpus = hardware.get("gpus") or []
    return _facts(
        [
            ("acclimate", run.get("acclimate")),
            ("Created", run.get("created")),
            ("Seed", str(run["seed"]) if run.get("seed") is not None else None),
            ("Git commit", commit),
            ("Device", hardware.get("device")),
            ("CPU", hardware.get("cpu")),
            ("Cores", hardware.get("cores")),
            ("Memory", f"{hardware['memory_gb']:.3g} GB" if hardware.get("memory_gb") is not None else None),
            ("GPUs", ", ".join(map(str, gpus)) or None),
            ("Processes", hardware.get("processes")),
            (
                "Versions",
                " · ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items()) or None,
            ),
            ("Files", " · ".join(map(str, (run.get("artifacts") or {}).values())) or None),
        ]
    )


def _facts(items: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(name, text) of what is known."""
    return [
        (name, json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else numbers.number(value))
        for name, value in items
        if value is not None
    ]


def _if_known(value: float | None, form: Callable[[float], str]) -> str | None:
    return None if value is None else form(value)


def _metric_name(name: str) -> str:
    return LABELS.get(name, _plain(name))


def _plain(key: str) -> str:
    return key.replace("_", " ").strip().capitalize()


def _hint(name: str) -> str:
    if name not in HIGHER:
        return ""
    return "higher is better" if HIGHER[name] else "lower is better"


def _when(created: str | None) -> str | None:
    """An ISO time as "30 November 2025, 10:02"; anything else as it stands."""
    if not created:
        return None
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    zone = " UTC" if time.tzinfo is not None and not time.utcoffset() else ""
    return f"{time.day} {time:%B %Y, %H:%M}{zone}"


def _read_json(path: Path) -> Json | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}). Run the command that wrote it again.") from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds {type(content).__name__}, expected an object. Run the command that wrote it again."
        )
    return content


def _read_jsonl(path: Path) -> list[Json] | None:
    """The rows of a JSONL file, None where there is no file. A last line that was cut off by a crash is left out."""
    if not path.is_file():
        return None
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path} line {number} is not valid JSON ({error}).") from None
    return rows
