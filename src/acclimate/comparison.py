"""Several recipes and seeds on the same rows, order and budget: a leaderboard, and which differences are real.

Every cell is an ordinary run in a process of its own, so that its peak memory is its own, a crash costs one cell, and
`--resume` continues cell by cell. The rows are those of `data_seed` for every cell; with the same seed, two cells see them in
the same order. Differences are bootstrapped over examples and seeds together, and called real only after Holm's correction
for the number of comparisons.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from acclimate import runs
from acclimate.errors import InputError
from acclimate.metrics import HIGHER_IS_BETTER, holm, in_words, paired_difference, verdict
from acclimate.prepare import located, with_sample_defaults
from acclimate.recipe import Recipe
from acclimate.runs import free_directory, read_rows
from acclimate.show import Silent
from acclimate.tasks import get_task
from acclimate.tasks.base import row_scores

# What must be the same in all cells, or they could not be compared example by example.
FIXED = ("data", "eval_data", "task", "seed", "data_seed", "columns", "labels", "max_eval_samples")
BUDGETS = {"steps": "train.max_steps", "tokens": "train.max_tokens", "seconds": "train.max_seconds"}


@dataclass(frozen=True)
class Comparison:
    """The result: `document` is what compare.json holds."""

    path: Path
    document: dict[str, Any]


def parse_vary(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """`["adapter=lora,ia3", "train.lr=1e-3,1e-4"]` as `--vary` gives them.

    >>> parse_vary(["adapter=lora,ia3", "train.batch_size=8,16"])
    {'adapter': ['lora', 'ia3'], 'train.batch_size': [8, 16]}
    """
    from acclimate.recipe import parse_assignments

    result = {}
    for pair in pairs:
        key, _, values = pair.partition("=")
        if not values:
            raise InputError(f"--vary takes key=value,value,.., not '{pair}'")
        result[key.strip()] = [parse_assignments([f"{key}={value}"])[key.strip()] for value in values.split(",")]
    return result


def compare(
    recipe: Recipe | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    budget: str = "steps",
    directory: str | Path | None = None,
    show: Any = None,
    **settings: Any,
) -> Comparison:
    """Run every combination of `vary` with every seed, and compare them with each other and the untouched model.

    >>> result = compare(vary={"adapter": ["lora"]}, seeds=1, budget="steps=1", max_eval_samples=8)
    >>> [cell["name"] for cell in result.document["cells"]]
    ['adapter=lora']

    Parameters
    ----------
    recipe, settings
        What all cells share, as for `tune`.
    vary
        Recipe key (dotted) to the values it takes, e.g. `{"adapter": ["lora", "full"], "train.lr": [1e-3, 1e-4]}`.
    seeds
        How many (0, 1, ..), or which.
    budget
        `steps` (what the recipe says), `steps=N`, `tokens=N` or `seconds=N` for every run.
    directory
        Where compare.json, report.html and the cells go; None: the next free name under `runs/`.

    Raises
    ------
    InputError
        Nothing to vary, a key that must stay fixed, or an invalid cell: all cells are validated before the first one runs.
    Interrupted
        On Ctrl-C; the running cell keeps its state. `resume_comparison(directory)` goes on.
    """
    recipe = with_sample_defaults((recipe or Recipe()).replace(**settings) if settings or recipe is None else recipe)
    recipe = located(recipe)
    seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    plan = {
        "recipe": recipe.model_dump(),
        "vary": {key: list(values) for key, values in (vary or {}).items()},
        "seeds": seeds,
        "budget": budget,
    }
    _cells(plan)  # validates
    path = Path(directory) if directory is not None else free_directory("compare")
    if path.exists() and any(path.iterdir()):
        raise InputError(
            f"'{path}' is not empty. Go on with a comparison there: --resume {path}; or choose another place with -o"
        )
    with runs.storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    runs.write_text(path / "plan.yaml", yaml.safe_dump(plan, sort_keys=False))
    return resume_comparison(path, show=show)


def resume_comparison(directory: str | Path, *, show: Any = None) -> Comparison:
    """Run the cells of a comparison that are not finished yet, and write its result."""
    from acclimate.recipe import read_yaml
    from acclimate.report import write_report

    path, show = Path(directory), show or Silent()
    if not (path / "plan.yaml").exists():
        raise InputError(f"no comparison at '{path}': it has no plan.yaml")
    plan = read_yaml(path / "plan.yaml")
    cells = _cells(plan)
    jobs = [(name, seed) for name in cells for seed in plan["seeds"]]
    errors: dict[tuple[str, int], str] = {}
    first: Path | None = None
    show.start(f"{len(cells)} cells, {len(plan['seeds'])} seeds", total=len(jobs))
    for name, seed in jobs:
        show.note(f"{name}, seed {seed}")
        place = path / "cells" / _folder(name) / f"seed-{seed}"
        error = _run_cell(place, cells[name].replace(seed=seed), first, show, f"{name}, seed {seed}")
        if error:
            errors[name, seed] = error
        elif first is None and cells[name].task != "classify":  # a new head is random: its score belongs to its seed
            first = place
        show.advance(1)
    show.stop()
    document = _document(path, plan, cells, errors)
    runs.write_json(path / "compare.json", document)
    write_report(path)
    return Comparison(path, document)


def _cells(plan: Mapping[str, Any]) -> dict[str, Recipe]:
    """Cell name -> recipe, in the order of the combinations."""
    vary, seeds = plan["vary"], plan["seeds"]
    if not vary or not all(vary.values()):
        raise InputError("name what to compare: --vary key=value,value (e.g. --vary adapter=lora,ia3)")
    for key in vary:
        if key in FIXED:
            raise InputError(
                f"'{key}' cannot vary inside one comparison: cells are compared on the same rows and seeds"
            )
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds must be one or more different numbers, not {seeds}")
    kind, _, amount = str(plan["budget"]).partition("=")
    limit: dict[str, Any] = {}
    if kind not in BUDGETS or (kind != "steps" and not amount):
        raise InputError(f"budget '{plan['budget']}' is not one of: steps, steps=N, tokens=N, seconds=N")
    if amount:
        try:
            limit = {BUDGETS[kind]: float(amount) if kind == "seconds" else int(float(amount))}
        except ValueError:
            raise InputError(f"budget '{plan['budget']}': '{amount}' is not a number") from None
    base = Recipe(**plan["recipe"])
    named = [key for key in vary if len(vary[key]) > 1] or list(vary)  # what all cells share names none of them
    cells = {}
    for values in itertools.product(*vary.values()):
        chosen = dict(zip(vary, values, strict=True))
        name = ", ".join(f"{key}={chosen[key]}" for key in named)
        cells[name] = base.replace(**{**chosen, **limit})
    return cells


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() or c in "=.-" else "_" for c in name.replace(", ", ","))


def _run_cell(place: Path, recipe: Recipe, before: Path | None, show: Any, label: str) -> str | None:
    """Run or resume one cell in a process of its own; returns its error, if any."""
    command = [sys.executable, "-m", "acclimate", "tune", "--quiet"]
    if (place / "recipe.yaml").exists():
        if runs.Run(place).finished:
            return None
        command += ["--resume", str(place)]
    else:
        wanted = place.with_suffix(".yaml")
        runs.write_text(wanted, recipe.to_yaml())
        command += [str(wanted), "-o", str(place)]
        if before is not None and runs.read_json(before / "run.json")["model"] == recipe.model:
            command += ["--before", str(before)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            step = _last_step(place / "metrics.jsonl")
            if step:
                show.note(f"{label}: step {step}")
    except KeyboardInterrupt:
        # the terminal sent the signal to the cell too; it stops at its next step and keeps its state
        process.wait()
        raise runs.Interrupted(f"stopped; go on with: acclimate compare --resume {place.parents[2]}") from None
    if process.returncode == 130:
        raise runs.Interrupted(f"stopped; go on with: acclimate compare --resume {place.parents[2]}")
    if process.returncode != 0:
        assert process.stderr is not None
        text = process.stderr.read().strip()
        return (
            text.removeprefix("error: ") if process.returncode in (2, 3) else (text.splitlines() or ["no message"])[-1]
        )
    return None


def _last_step(file: Path) -> int | None:
    try:
        lines = file.read_bytes().rsplit(b"\n", 2)
        return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else None
    except (OSError, ValueError, KeyError):
        return None


# --- the result ---


def _document(
    path: Path, plan: Mapping[str, Any], cells: Mapping[str, Recipe], errors: Mapping[tuple[str, int], str]
) -> dict[str, Any]:
    task = get_task(next(iter(cells.values())).task or "choice")
    entries, scores = [], {}
    base: dict[str, Any] | None = None
    for name, recipe in cells.items():
        places = {seed: path / "cells" / _folder(name) / f"seed-{seed}" for seed in plan["seeds"]}
        done = {seed: place for seed, place in places.items() if (name, seed) not in errors}
        entry: dict[str, Any] = {
            "name": name,
            "settings": {key: _get(recipe, key) for key in plan["vary"]},
            "error": next((errors[name, seed] for seed in places if (name, seed) in errors), None),
            "metrics": {},
            "runs": [],
        }
        entries.append(entry)
        if not done:
            continue
        if base is None:
            place = next(iter(done.values()))
            rows = row_scores(read_rows(place / "predictions_before.jsonl"))
            evaluation = runs.read_json(place / "evaluation_before.json")
            base = {"name": "base", "metrics": evaluation["metrics"], "reliability": evaluation["reliability"]}
            scores["base"] = {metric: values[None] for metric, values in rows.items()}
        entry |= _cell_entry(path, done)
        per_seed = [row_scores(read_rows(place / "predictions.jsonl")) for place in done.values()]
        scores[name] = {metric: np.stack([s[metric] for s in per_seed]) for metric in per_seed[0]}
        for metric, values in scores[name].items():  # over examples and seeds, where the scores of single rows allow it
            entry["metrics"][metric] = _interval(values)
    if base is None:
        raise InputError("every cell failed; the first one says: " + next(iter(errors.values())))
    differences = _differences(scores, task.metric)
    return {
        "name": path.name,
        "task": task.name,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "budget": plan["budget"] if "=" in plan["budget"] else f"{_steps(entries)} steps",
        "n_examples": int(scores["base"]["nll"].shape[1]),
        "seeds": plan["seeds"],
        "base": base,
        "cells": entries,
        "differences": differences,
        "conclusion": _conclusion(differences, entries, task, len(plan["seeds"])),
    }


def _get(recipe: Recipe, key: str) -> Any:
    value: Any = recipe.model_dump()
    for part in key.split("."):
        value = value[part]
    return value


def _steps(entries: list[dict[str, Any]]) -> str:
    counts = sorted({run["steps"] for entry in entries for run in entry["runs"]})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _interval(values: np.ndarray) -> dict[str, Any]:
    found = paired_difference(values, np.zeros_like(values))
    return {"value": found.value, "low": found.low, "high": found.high, "level": found.level, "n": found.n_examples}


def _cell_entry(path: Path, done: Mapping[int, Path]) -> dict[str, Any]:
    infos = [runs.read_json(place / "run.json") for place in done.values()]
    evaluations = [runs.read_json(place / "evaluation_after.json") for place in done.values()]
    names = evaluations[0]["metrics"]
    listed = []
    for (seed, place), info, evaluation in zip(done.items(), infos, evaluations, strict=True):
        losses = [(row["step"], row["loss"]) for row in read_rows(place / "metrics.jsonl") if "loss" in row]
        listed.append(
            {
                "seed": seed,
                "path": str(place.relative_to(path)),
                "status": info["status"],
                "steps": info["steps"],
                "metrics": {name: evaluation["metrics"][name]["value"] for name in names},
                "loss": losses,
            }
        )
    single = evaluations[0]["metrics"] if len(evaluations) == 1 else {}
    metrics = {
        name: single.get(name)
        or {
            "value": float(np.mean([e["metrics"][name]["value"] for e in evaluations])),
            "low": None,
            "high": None,
            "level": None,
            "n": evaluations[0]["n"],
        }
        for name in names
    }
    return {
        "metrics": metrics,
        "reliability": evaluations[0]["reliability"],
        "trainable": infos[0]["parameters"]["trainable"],
        "peak_memory_bytes": max(info["peak_memory_bytes"] for info in infos),
        "seconds_per_step": float(np.median([info["seconds_per_step"] for info in infos])),
        "train_seconds": float(np.mean([info["train_seconds"] for info in infos])),
        "adapter_bytes": infos[0]["adapter_bytes"],
        "runs": listed,
    }


def _differences(scores: Mapping[str, Mapping[str, np.ndarray]], main: str) -> list[dict[str, Any]]:
    """All pairs, in every per-row metric; the p-values of one metric are corrected together."""
    result = []
    metrics = sorted(next(iter(scores.values())), key=lambda metric: metric != main)
    # the trained cell comes first, so that sentences read "lora is better than base"
    pairs = list(itertools.combinations([*[name for name in scores if name != "base"], "base"], 2))
    for metric in metrics:
        found = [(a, b, paired_difference(scores[a][metric], scores[b][metric])) for a, b in pairs]
        adjusted = holm([difference.p_value for _, _, difference in found])
        for (a, b, difference), p in zip(found, adjusted, strict=True):
            higher = HIGHER_IS_BETTER[metric]
            judged = verdict(difference, higher)
            words = in_words(a, b, metric, difference, higher)
            if judged != "no clear difference" and p >= 1 - difference.level:
                judged = "no clear difference"
                words += f" Not real after correcting for {len(pairs)} comparisons (p = {p:.3f})."
            result.append(
                {
                    "a": a,
                    "b": b,
                    "metric": metric,
                    **difference.to_dict(),
                    "p_holm": p,
                    "verdict": judged,
                    "words": words,
                }
            )
    return result


def _conclusion(differences: list[dict[str, Any]], entries: list[dict[str, Any]], task: Any, seeds: int) -> list[str]:
    """The few sentences a person reads: who helped, who is best, and who cannot be told from the best."""
    main = [row for row in differences if row["metric"] == task.metric]
    lines = [row["words"] for row in main if row["b"] == "base"]
    finished = [entry for entry in entries if entry["metrics"]]
    best = sorted(finished, key=lambda e: e["metrics"][task.metric]["value"], reverse=task.higher_is_better)[0]["name"]
    rivals = [row for row in main if best in (row["a"], row["b"]) and "base" not in (row["a"], row["b"])]
    lines += [row["words"] for row in rivals]
    equal = [row["b"] if row["a"] == best else row["a"] for row in rivals if row["verdict"] == "no clear difference"]
    if equal:
        lines.append(
            f"{best} has the best {task.metric}, but it cannot be told apart from {' or '.join(equal)} on this evidence."
        )
    elif rivals:
        lines.append(f"{best} is the best of {len(finished)}, and the difference to every other is real.")
    if seeds == 1:
        lines.append("One seed: the intervals say nothing about how much another seed would change.")
    lines += [f"{entry['name']} failed: {entry['error']}" for entry in entries if entry["error"]]
    return lines
