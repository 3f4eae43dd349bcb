"""Starts that look at the data (`--init fisher`) inside the job: every task, resumption, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acclimate import evaluate, tune
from acclimate.errors import InputError
from acclimate.recipe import Recipe
from acclimate.runs import Interrupted, Run, read_json, read_rows
from conftest import colour_rows, signal_at, task_rows, write_jsonl


@pytest.fixture
def recipe_of(tmp_path: Path, tiny_lm: Path, tiny_encoder: Path) -> Callable[..., Recipe]:
    def make(task: str, **fields: Any) -> Recipe:
        rows = task_rows(task, colour_rows(24))
        train = {"max_steps": 8, "batch_size": 8, "lr": 5e-3, "save_every": 3}
        content = {
            "model": str(tiny_encoder if task == "classify" else tiny_lm),
            "data": str(write_jsonl(tmp_path / f"{task}.jsonl", rows)),
            "task": task,
            "init": "fisher",
            "train": train,
        }
        return Recipe(**{**content, **fields})

    return make


@pytest.mark.parametrize("task", ["choice", "classify", "sft", "dpo"])
def test_every_task_starts_in_its_own_directions(task: str, recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    run = tune(recipe_of(task), directory=tmp_path / "run")
    found = read_json(run / "init.json")
    assert found["skipped"] == []
    assert {layer["rank"] for layer in found["layers"]} == {8}
    assert all(0 < layer["share_inputs"] <= 1 and layer["positions"] > 0 for layer in found["layers"])
    assert found["seconds"] > 0
    assert "find the start" in run.info["timings"]
    start = load_file(run / "start" / "adapter_model.safetensors")
    a, b = (next(v for k, v in sorted(start.items()) if name in k) for name in ("lora_A", "lora_B"))
    assert torch.equal((a != 0).any(1), torch.tensor([True] * 4 + [False] * 4))
    assert torch.equal((b != 0).any(0), torch.tensor([False] * 4 + [True] * 4))
    assert len(read_rows(run / "metrics.jsonl")) == 8
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(not torch.equal(trained[key], start[key]) for key in start if "lora_" in key)
    page = (run / "report.html").read_text()
    assert "Where the adapter starts" in page


@pytest.mark.parametrize("start", [{}, {"mode": "residual"}, {"rank_budget": "fisher"}])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    start: dict[str, Any], recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = recipe_of("choice", init_args=start)
    whole = tune(recipe, directory=tmp_path / "whole")
    with signal_at(5), pytest.raises(Interrupted):
        tune(recipe, directory=tmp_path / "run")
    stamp = (tmp_path / "run" / "init.json").stat().st_mtime_ns
    run = tune(directory=tmp_path / "run", resume=True)
    assert (run / "init.json").stat().st_mtime_ns == stamp, "the start is found once"
    mine, theirs = (load_file(r / "adapter" / "adapter_model.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    again = evaluate(run.path)
    assert again["nll"] == pytest.approx(read_json(run / "evaluation_after.json")["metrics"]["nll"]["value"], abs=1e-5)


def test_a_residual_start_is_saved_as_one_plain_lora(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    run = tune(recipe_of("classify", init_args={"mode": "residual"}, adapter_args={"r": 4}), directory=tmp_path / "run")
    config = read_json(run / "adapter" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (8, 32)
    assert sorted(p.name for p in (run / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert evaluate(run.path)["nll"] == pytest.approx(
        read_json(run / "evaluation_after.json")["metrics"]["nll"]["value"], abs=1e-5
    )


def test_the_start_follows_the_seed_and_the_arguments(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    def start(name: str, **fields: Any) -> dict[str, torch.Tensor]:
        run: Run = tune(recipe_of("choice", **fields), directory=tmp_path / name)
        return load_file(run / "start" / "adapter_model.safetensors")

    one, same, other = start("a"), start("b"), start("c", init_args={"factors": "kfac"})
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.allclose(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        ("choice", {"init_args": {"n_example": 4}}, "init_args do not fit init 'fisher': unknown 'n_example'. Did you mean 'n_examples'?"),
        ("choice", {"init_args": {"mode": "both"}}, "init 'fisher': mode is one of input, split, residual, not 'both'"),
        ("choice", {"init_args": {"n_examples": 0}}, "init 'fisher': n_examples must be at least 1, not 0"),
        ("choice", {"adapter": "ia3"}, "init 'fisher' starts LoRA; adapter 'ia3' has its own start"),
        ("choice", {"init_args": {"fisher": "true"}}, "draws labels token by token, for task 'sft'; for 'choice' take 'empirical'"),
        ("dpo", {"init_args": {"mode": "residual"}}, "init_args.mode 'residual' does not fit task 'dpo'"),
        ("choice", {"init_args": {"mode": "residual"}, "adapter": "dora"}, "which DoRA's rescaling does not allow"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(
    task: str, fields: dict[str, Any], message: str, recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        tune(recipe_of(task, **fields), directory=tmp_path / "run")
    assert message in str(caught.value)


def test_labels_drawn_from_the_model(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    run = tune(recipe_of("sft", init_args={"fisher": "true"}), directory=tmp_path / "run")
    assert read_json(run / "init.json")["settings"]["fisher"] == "true"
