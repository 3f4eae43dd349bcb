"""Was it a good idea? What a merge or a soup scores on the user's rows, next to its inputs and to what else could be done with them.

A merge of T adapters has T sets of rows, one a task: each adapter is scored on its own, everything else on all. A soup has as many as
the user names. Scores are those of `acclimate evaluate`. "Kept" is the share of the reference's score (a task's own adapter; the
fine-tuned model of a soup) that is left: value / reference, or reference / value where lower is better.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from acclimate import runs
from acclimate.data import Table, sample
from acclimate.errors import InputError
from acclimate.merge import baselines
from acclimate.merge.adapter_files import CONFIG, WEIGHTS, Adapter, open_adapter
from acclimate.merge.adapters import merge_in_memory
from acclimate.merge.checkpoints import copy_other_files, open_checkpoint
from acclimate.merge.plan import plan_merge
from acclimate.prepare import load_for, load_tuned
from acclimate.recipe import Recipe
from acclimate.tasks.base import Evaluation, Examples, Task, differences
from acclimate.use import measure, rows_to_score

SCORES = "scores.json"
OWN_ROWS = "own"
RULES = ("mean", "ties", "dare", "tsv")
ALPHAS = (0.3, 0.5, 0.7)


@dataclass(frozen=True)
class Rows:
    """Rows of one task to score on, and the recipe that says how."""

    name: str
    recipe: Recipe
    task: Task
    table: Table


@dataclass(frozen=True)
class System:
    """A model, with an adapter or without. `only`: the number of the one set of rows it is scored on."""

    name: str
    role: Literal["base", "reference", "result", "baseline"]
    model: str
    adapter: Path | None = None
    only: int | None = None


def read_rows(
    sources: Sequence[str], inputs: Sequence[str | Path], model: str | None, settings: Mapping[str, Any]
) -> list[Rows]:
    """The rows named on the command line, each with the input of the merge (or soup) that it belongs to.

    A source is what `acclimate evaluate --data` takes, `name=source`, or "own": the evaluation rows of an input that is a run. What is
    not said in `settings` is taken from the run's recipe. Raises InputError for what cannot be scored.
    """
    found: list[Rows] = []
    for source, path in zip(sources, inputs, strict=True):
        name, where = _named(source)
        is_run = (Path(path) / "run.json").exists()
        if where == OWN_ROWS and not is_run:
            raise InputError(f"'{path}' is no run of acclimate and has no rows of its own: --evaluate FILE")
        subject = path if is_run else model
        assert subject is not None
        recipe, task, table = rows_to_score(subject, None if where == OWN_ROWS else where, settings)
        label = name or (Path(path).name if where == OWN_ROWS else Path(where.partition(":")[0]).name.partition(".")[0])
        if any(rows.name == label for rows in found):
            raise InputError(f"two sets of rows are called '{label}': give them names, --evaluate NAME={where}")
        found.append(Rows(label, recipe, task, table))
    return found


def _named(source: str) -> tuple[str | None, str]:
    """(name or None, source) of `name=source`."""
    name, equals, where = source.partition("=")
    if not equals or Path(source).exists():
        return None, source
    if not name or not where:
        raise InputError(f"--evaluate takes DATA or NAME=DATA, not '{source}'")
    return name, where


def base_model(paths: Sequence[str | Path], model: str | None) -> str:
    """The model that adapters belong to: `model`, or what the first of them says. Raises InputError where none says it."""
    if model is not None:
        return model
    for path in paths:
        if (Path(path) / "run.json").exists():
            return Recipe.from_yaml(Path(path) / "recipe.yaml").model
        if named := open_adapter(path).config.get("base_model_name_or_path"):
            return str(named)
    raise InputError(f"'{paths[0]}' does not say which model it belongs to. Name it with --model")


# --- who is scored ---


def merge_systems(
    paths: Sequence[str | Path], result: Path, base: str, rule: str, weights: Sequence[float] | None, **options: Any
) -> Iterator[System]:
    """Base, inputs, the merged adapter, and the usual rules with the same weights at the same rank, each made when it is asked for."""
    adapters = [open_adapter(path) for path in paths]
    yield System("base", "base", base)
    for number, adapter in enumerate(adapters):
        yield System("own adapter", "reference", base, _directory(adapter), number)
    merged = open_adapter(result)
    yield System(f"merged ({rule})", "result", base, result)
    for other in RULES:
        if other != rule and not (other == "mean" and weights is not None and sum(weights) == 0):
            plan = plan_merge(adapters, rule=other, rank=merged.config["r"], weights=weights, **options)
            config, state, _ = merge_in_memory(plan)
            with _adapter(config, state) as place:
                yield System(other, "baseline", base, Path(place))
    try:
        config, state = baselines.peft_linear(adapters, weights)
    except ValueError:  # of different ranks or layers
        return
    with _adapter(config, state) as place:
        yield System("linear (PEFT)", "baseline", base, Path(place))


def adapter_soup_systems(path: str | Path, result: Path, base: str) -> Iterator[System]:
    """Base, the adapter as it was trained, the souped one, and the adapter scaled down (WiSE-FT)."""
    adapter = open_adapter(path)
    yield System("base", "base", base)
    yield System("tuned", "reference", base, _directory(adapter))
    yield System("soup", "result", base, result)
    for alpha in ALPHAS:
        patterns = {name: alpha * value for name, value in (adapter.config.get("alpha_pattern") or {}).items()}
        config = {**adapter.config, "lora_alpha": alpha * adapter.config["lora_alpha"], "alpha_pattern": patterns}
        with _adapter(config, {name: adapter.read(name) for name in adapter.shapes}) as place:
            yield System(f"WiSE-FT {alpha:g}", "baseline", base, Path(place))


def soup_systems(base: str, tuned: str, result: Path) -> Iterator[System]:
    """The two checkpoints, the soup, and interpolations of the two: WiSE-FT at three shares, and LiNeS where blocks are numbered."""
    place = model_directory(tuned)
    yield System("base", "base", str(model_directory(base)))
    yield System("tuned", "reference", str(place))
    yield System("soup", "result", str(result))
    for alpha in ALPHAS:
        with _checkpoint(baselines.wise_ft(base, tuned, alpha), place) as directory:
            yield System(f"WiSE-FT {alpha:g}", "baseline", directory)
    try:
        state = baselines.lines(base, tuned)
    except InputError:
        return
    with _checkpoint(state, place) as directory:
        yield System("LiNeS", "baseline", directory)


def model_directory(path: str) -> Path:
    """Where a checkpoint lies with its configuration. Raises InputError for one that has none, which cannot be loaded."""
    place = open_checkpoint(path).files[0].parent
    if Path(path).is_file() or not (place / "config.json").exists():
        raise InputError(f"--evaluate loads the models, and '{path}' has no config.json beside it: name a directory")
    return place


def _directory(adapter: Adapter) -> Path:
    assert adapter.path is not None
    return adapter.path.parent


def _adapter(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory()
    save_file(dict(state), Path(directory.name, WEIGHTS))
    runs.write_json(Path(directory.name, CONFIG), dict(config))
    return directory


def _checkpoint(state: Mapping[str, Tensor], like: Path) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory()
    own = {
        name: value.clone().contiguous() for name, value in state.items()
    }  # names that shared storage have their own
    save_file(own, Path(directory.name, "model.safetensors"), metadata={"format": "pt"})
    copy_other_files(like, Path(directory.name))
    return directory


# --- scoring ---


class _Scorer:
    """Scores systems on rows; the last model stays loaded, since the next system often has the same one."""

    def __init__(self, show: Any) -> None:
        self.show = show
        self.key: Any = None
        self.model: Any = None
        self.tokenizer: Any = None
        self.examples: dict[str, Examples] = {}

    def __call__(self, system: System, rows: Rows) -> Evaluation:
        recipe = rows.recipe.replace(model=system.model, adapter="lora")
        key = (system.model, rows.task.auto_class, rows.task.model_options(recipe))
        if key != self.key:
            self.model, self.tokenizer = load_for(rows.task, recipe, self.show)
            self.key = key
        if rows.name not in self.examples:
            table = sample(rows.table, recipe.max_eval_samples, recipe.data_seed + 1)
            self.examples[rows.name] = rows.task.examples(table, recipe, self.tokenizer)
            if not self.examples[rows.name].items:
                raise InputError(f"no usable rows in '{table.source}'")
        model = self.model.eval() if system.adapter is None else load_tuned(self.model, recipe, system.adapter)
        what = f"{system.name} on {rows.name}"
        found = measure(rows.task, model, self.tokenizer, self.examples[rows.name], recipe, self.show, what)
        if system.adapter is not None:
            self.model = model.unload()
            if runs.read_json(system.adapter / CONFIG).get("modules_to_save"):
                self.key = None  # its own heads are still on the model
        return found


def score(systems: Iterable[System], rows: Sequence[Rows], what: str, show: Any) -> dict[str, Any]:
    """Score every system on its rows: the document that is written as scores.json. `what` is "merge" or "soup"."""
    scorer = _Scorer(show)
    found: dict[str, tuple[str, dict[str, Evaluation]]] = {}
    for system in systems:
        for number, part in enumerate(rows):
            if system.only in (None, number):
                found.setdefault(system.name, (system.role, {}))[1][part.name] = scorer(system, part)
    reference, result, base = (_of_role(found, role) for role in ("reference", "result", "base"))
    listed = []
    for name, (role, scores) in found.items():
        kept = {part: _kept(scores[part], found[reference][1][part]) for part in scores}
        known = [value for value in kept.values() if value is not None]
        listed.append(
            {
                "name": name,
                "role": role,
                "scores": {part: evaluation.metrics[evaluation.metric] for part, evaluation in scores.items()},
                "kept": kept,
                "mean_kept": float(np.mean(known)) if known else None,
            }
        )
    pairs = []
    for other in (reference, base):
        for part in rows:
            after, before = found[result][1][part.name], found[other][1][part.name]
            entry = differences(after.predictions, before.predictions, (result, other))[after.metric]
            pairs.append({"a": result, "b": other, "rows": part.name, "metric": after.metric, **entry})
    document = {
        "what": what,
        "rows": [
            {
                "name": part.name,
                "source": part.table.source,
                "task": part.task.name,
                "n": len(found[result][1][part.name].predictions),
                "metric": part.task.metric,
                "higher_is_better": part.task.higher_is_better,
            }
            for part in rows
        ],
        "systems": listed,
        "differences": pairs,
    }
    return {**document, "conclusion": _conclusion(document, reference)}


def _of_role(found: Mapping[str, tuple[str, Any]], role: str) -> str:
    return next(name for name, (own, _) in found.items() if own == role)


def _kept(evaluation: Evaluation, reference: Evaluation) -> float | None:
    value, own = evaluation[evaluation.metric], reference[reference.metric]
    top, bottom = (value, own) if evaluation.higher_is_better else (own, value)
    return top / bottom if bottom > 0 else None


def _conclusion(document: Mapping[str, Any], reference: str) -> list[str]:
    """The few sentences a person reads."""
    systems = {system["name"]: system for system in document["systems"]}
    by_role: dict[str, list[dict[str, Any]]] = {}
    for system in systems.values():
        if system["mean_kept"] is not None:
            by_role.setdefault(system["role"], []).append(system)
    lines = []
    if "result" in by_role:
        result = by_role["result"][0]
        untouched = "".join(f"; '{one['name']}' has {one['mean_kept']:.1%}" for one in by_role.get("base", []))
        lines.append(
            f"On average '{result['name']}' keeps {result['mean_kept']:.1%} of the score of '{reference}'{untouched}."
        )
        if others := by_role.get("baseline"):
            best = max(others, key=lambda one: one["mean_kept"])
            lines.append(f"The best of the others is '{best['name']}', with {best['mean_kept']:.1%}.")
    lines += [f"On {pair['rows']}: {pair['words']}" for pair in document["differences"] if pair["b"] == reference]
    return lines


def write_scores(document: Mapping[str, Any], directory: Path) -> Path:
    """scores.json and report.html beside the result; the path of the page."""
    from acclimate.report import write_report

    runs.write_json(directory / SCORES, dict(document))
    return write_report(directory)
