"""Comparisons: the plan, the statistics, resuming cell by cell, and a cell that fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from acclimate.comparison import _conclusion, _differences, compare, parse_vary, resume_comparison
from acclimate.errors import InputError
from acclimate.recipe import Recipe
from acclimate.tasks import get_task

TRAIN = {"lr": 1e-2, "max_steps": 6, "batch_size": 8}


def settings(tiny_lm: Path, colour_files: tuple[Path, Path]) -> dict:
    train, test = colour_files
    return {"model": str(tiny_lm), "data": str(train), "eval_data": str(test), "task": "choice", "train": TRAIN}


@pytest.mark.parametrize(
    ("vary", "options", "message"),
    [
        ({}, {}, "name what to compare"),
        ({"adapter": []}, {}, "name what to compare"),
        ({"data": ["a", "b"]}, {}, "'data' cannot vary"),
        ({"seed": [1, 2]}, {}, "'seed' cannot vary"),
        ({"adapter": ["lora", "lorra"]}, {}, "Did you mean 'lora'"),
        ({"train.lrr": [1]}, {}, "Did you mean 'train.lr'"),
        ({"adapter": ["lora"]}, {"budget": "epochs=2"}, "budget 'epochs=2' is not one of"),
        ({"adapter": ["lora"]}, {"budget": "tokens"}, "budget 'tokens' is not one of"),
        ({"adapter": ["lora"]}, {"budget": "steps=many"}, "'many' is not a number"),
        ({"adapter": ["lora"]}, {"seeds": [0, 0]}, "different numbers"),
        ({"adapter": ["lora"]}, {"seeds": 0}, "different numbers"),
    ],
)
def test_bad_plans_are_refused_before_anything_runs(
    vary: dict, options: dict, message: str, tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        compare(Recipe(**settings(tiny_lm, colour_files)), vary, directory=tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_parse_vary() -> None:
    assert parse_vary(["train.lr=1e-3,0.1", "adapter=lora"]) == {"train.lr": [0.001, 0.1], "adapter": ["lora"]}
    with pytest.raises(InputError, match="--vary takes key=value"):
        parse_vary(["adapter"])


def test_differences_are_corrected_for_their_number() -> None:
    """A borderline pair is called real alone, and not among many; a large one stays real."""
    rng = np.random.default_rng(0)
    shared = rng.random(400)

    def scores(shift: float, seed: int) -> dict[str, np.ndarray]:
        noise = np.random.default_rng(seed).normal(0, 0.3, 400)
        return {"accuracy": (shared + noise - noise.mean() + shift)[None], "nll": shared[None]}

    alone = _differences({"a": scores(0.048, 1), "base": scores(0, 2)}, "accuracy")[0]
    assert alone["verdict"] == "better"
    crowd = {f"c{i}": scores(0.0, 10 + i) for i in range(6)}
    many = _differences({"a": scores(0.048, 1), "big": scores(0.5, 3), **crowd, "base": scores(0, 2)}, "accuracy")
    found = {(row["a"], row["b"]): row for row in many if row["metric"] == "accuracy"}
    assert found["a", "base"]["verdict"] == "no clear difference"
    assert "comparisons" in found["a", "base"]["words"]
    assert found["big", "base"]["verdict"] == "better"
    assert found["a", "base"]["p_holm"] > found["a", "base"]["p_value"]
    # identical scores differ by nothing
    assert all(row["value"] == 0 and row["verdict"] == "no clear difference" for row in many if row["metric"] == "nll")


def test_conclusion_names_the_best_and_its_equals() -> None:
    task = get_task("choice")
    entries = [
        {"name": n, "metrics": {"accuracy": {"value": v}}, "error": None}
        for n, v in (("a", 0.9), ("b", 0.89), ("c", 0.5))
    ]
    rows = [
        {
            "a": "a",
            "b": "b",
            "metric": "accuracy",
            "verdict": "no clear difference",
            "words": "a and b cannot be told apart",
        },
        {"a": "a", "b": "c", "metric": "accuracy", "verdict": "better", "words": "a is better than c"},
        {"a": "a", "b": "base", "metric": "accuracy", "verdict": "better", "words": "a is better than base"},
    ]
    lines = _conclusion(rows, entries, task, seeds=1)
    assert lines[0] == "a is better than base"
    assert "a has the best accuracy, but it cannot be told apart from b on this evidence." in lines
    assert any(line.startswith("One seed") for line in lines)


@pytest.fixture(scope="module")
def finished(tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compare") / "c"
    compare(
        vary={"adapter": ["lora", "full"]},
        seeds=2,
        directory=place,
        budget="steps=5",
        **settings(tiny_lm, colour_files),
    )
    return place


def test_a_comparison_from_end_to_end(finished: Path) -> None:
    document = json.loads((finished / "compare.json").read_text())
    assert document["budget"] == "steps=5"
    assert document["n_examples"] == 30
    cells = {cell["name"]: cell for cell in document["cells"]}
    assert list(cells) == ["adapter=lora", "adapter=full"]
    for cell in cells.values():
        accuracies = []
        for run in cell["runs"]:
            rows = [
                json.loads(line) for line in (finished / run["path"] / "predictions.jsonl").read_text().splitlines()
            ]
            accuracies.append(np.mean([row["correct"] for row in rows]))
            assert run["steps"] == 5
            assert len(run["loss"]) == 5
            assert (finished / run["path"] / "report.html").exists()
        assert cell["metrics"]["accuracy"]["value"] == pytest.approx(np.mean(accuracies))
        assert cell["peak_memory_bytes"] > 1e8
    assert cells["adapter=full"]["trainable"] > 5 * cells["adapter=lora"]["trainable"]
    # every cell scored the same rows, and the untouched model was scored once
    ids = {
        (finished / f"cells/adapter={a}/seed-{s}/predictions_before.jsonl").read_bytes()
        for a in ("lora", "full")
        for s in (0, 1)
    }
    assert len(ids) == 1
    # the same seed sees the rows in the same order: the first loss, before any step, is the same for both adapters
    first = {cell["runs"][0]["loss"][0][1] for cell in cells.values()}
    assert max(first) == pytest.approx(min(first), rel=1e-5)
    assert "adapter=lora" in (finished / "report.html").read_text()
    pairs = [(row["a"], row["b"]) for row in document["differences"] if row["metric"] == "accuracy"]
    assert pairs == [("adapter=lora", "adapter=full"), ("adapter=lora", "base"), ("adapter=full", "base")]


def test_resume_runs_only_what_is_missing(finished: Path) -> None:
    import shutil

    before = json.loads((finished / "compare.json").read_text())
    kept = finished / "cells/adapter=lora/seed-0/adapter/adapter_model.safetensors"
    removed = finished / "cells/adapter=full/seed-1"
    stamp = kept.stat().st_mtime_ns
    shutil.rmtree(removed)
    document = resume_comparison(finished).document
    assert kept.stat().st_mtime_ns == stamp
    assert removed.exists()
    for old, new in zip(before["cells"], document["cells"], strict=True):
        assert new["metrics"] == old["metrics"]


def test_a_failing_cell_does_not_take_the_others(
    tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path
) -> None:
    vary = {"adapter_args.target_modules": ["all-linear", "nowhere"]}
    result = compare(vary=vary, seeds=1, directory=tmp_path / "c", budget="steps=2", **settings(tiny_lm, colour_files))
    good, bad = result.document["cells"]
    assert good["error"] is None
    assert "match nothing" in bad["error"]
    assert bad["metrics"] == {}
    assert any("nowhere" in line and "failed" in line for line in result.document["conclusion"])


def test_interrupt_keeps_the_cell(tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches both processes: both stop, and --resume finishes."""
    train, test = colour_files
    command = [
        sys.executable, "-m", "acclimate", "compare", "--model", str(tiny_lm), "--data", str(train), "--eval-data", str(test),
        "--task", "choice", "--vary", "adapter=lora", "--seeds", "1", "--budget", "steps=4000", "-o", "c", "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "c/cells/adapter=lora/seed-0/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    import os

    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume c" in stderr
    assert json.loads((metrics.parent / "run.json").read_text())["status"] == "interrupted"
    assert list((metrics.parent / "checkpoints").glob("checkpoint-*"))


def test_our_own_adapters_and_starts_take_part(tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path) -> None:
    common = {"seeds": 1, "budget": "steps=2", **settings(tiny_lm, colour_files)}
    adapters = compare(vary={"adapter": ["frameft", "bayesian-lora"]}, directory=tmp_path / "adapters", **common)
    starts = compare(vary={"init": ["default", "fisher"]}, directory=tmp_path / "starts", **common)
    for document, names in ((adapters.document, 2), (starts.document, 2)):
        assert [cell["error"] for cell in document["cells"]] == [None] * names
        assert all(cell["trainable"] > 0 for cell in document["cells"])
    first, second = (cell["trainable"] for cell in starts.document["cells"])
    assert first == second  # a start changes no sizes
