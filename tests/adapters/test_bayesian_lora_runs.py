"""Bayesian-LoRA through the command's path: training with the KL, resuming, and predictions that say how sure they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file

from acclimate import training
from acclimate.adapters.bayesian_lora import tuner_of
from acclimate.adapters.bayesian_lora.training import KLCallback, kl_divergence
from acclimate.cli.common import run_app
from acclimate.errors import InputError
from acclimate.pipeline import tune
from acclimate.prepare import load_run
from acclimate.recipe import Recipe
from acclimate.runs import Interrupted, Run, read_rows
from acclimate.use import evaluate, export, predict
from conftest import WORDS, colour_rows, signal_at, task_rows, write_jsonl

TASKS = ("choice", "classify", "sft", "dpo")


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory, tiny_lm: Path, tiny_encoder: Path) -> Callable[..., Recipe]:
    where = tmp_path_factory.mktemp("data")

    def make(task: str, **fields: Any) -> Recipe:
        files = [
            str(write_jsonl(where / f"{task}-{seed}.jsonl", task_rows(task, colour_rows(count, seed))))
            for seed, count in enumerate((48, 30))
        ]
        options: dict[str, Any] = {
            "model": str(tiny_encoder if task == "classify" else tiny_lm),
            "data": files[0],
            "eval_data": files[1],
            "task": task,
            "adapter": "bayesian-lora",
            "adapter_args": {"r": 4, "lora_alpha": 8},
        }
        train = {"max_steps": 12, "lr": 1e-2, "save_every": 5, **fields.pop("train", {})}
        return Recipe(**{**options, "train": train, **fields})

    return make


@pytest.fixture(scope="module")
def finished(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    made: dict[str, Run] = {}
    where = tmp_path_factory.mktemp("runs")

    def get(task: str) -> Run:
        if task not in made:
            made[task] = tune(recipe_of(task), directory=where / task)
        return made[task]

    return get


def inputs_of(task: str, count: int = 5) -> list[dict[str, Any]]:
    key = "prompt" if task in ("sft", "dpo") else "text"
    return [{key: row["text"]} for row in colour_rows(count, seed=9)]


@pytest.mark.parametrize("task", TASKS)
def test_the_kl_is_trained_and_logged_in_every_task(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["beta"] for row in rows] == pytest.approx([0] * 5 + [0.0025, 0.005, 0.0075] + [0.01] * 4)
    assert all(row["kl_u"] > 0 and row["kl_cond"] > 1000 for row in rows)
    # lambda rises to its maximum, which is what lowers the conditional part
    assert rows[-1]["kl_cond"] < rows[4]["kl_cond"]
    assert PeftConfig.from_pretrained(str(run / "adapter")).n_train == 48  # type: ignore[attr-defined]


def test_the_last_logged_kl_is_that_of_the_weights_before_the_last_step(finished: Callable[[str], Run]) -> None:
    run = finished("choice")
    model, *_ = load_run(run.path)
    kl = kl_divergence(model)
    last = read_rows(run / "metrics.jsonl")[-1]
    assert kl.conditional.item() == pytest.approx(last["kl_cond"], rel=0.01)
    assert kl.conditional.item() < last["kl_cond"]


def test_a_number_of_examples_that_is_given_stays(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of("choice", adapter_args={"r": 2, "n_train": 500}, train={"max_steps": 1})
    run = tune(recipe, directory=tmp_path / "run")
    assert PeftConfig.from_pretrained(str(run / "adapter")).n_train == 500  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["choice", "sft"])
def test_interrupted_and_resumed_ends_with_the_same_weights(
    finished: Callable[[str], Run],
    recipe_of: Callable[..., Recipe],
    tmp_path: Path,
    task: str,
) -> None:
    """The draws come from the random state that a checkpoint keeps, the weight of the KL from the step."""
    whole = finished(task)
    with signal_at(7), pytest.raises(Interrupted):
        tune(recipe_of(task), directory=tmp_path / "run")
    run = tune(directory=tmp_path / "run", resume=True)
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()
    drop = ("seconds", "num_tokens")  # TRL counts tokens anew after a resumption
    rows = [
        [{k: v for k, v in row.items() if k not in drop} for row in read_rows(r / "metrics.jsonl")]
        for r in (run, whole)
    ]
    assert rows[0] == rows[1]


def test_the_reference_of_dpo_is_the_untouched_model(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    """With beta x margin at zero before any step, the first loss is ln 2 but for the policy's own noise."""
    recipe = recipe_of("dpo", train={"max_steps": 1}, adapter_args={"r": 4, "max_lambda": 1e-6, "max_sd": 1e-6})
    run = tune(recipe, directory=tmp_path / "run")
    assert read_rows(run / "metrics.jsonl")[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_the_kl_is_added_once(
    recipe_of: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Also for DPO, whose trainer copies the adapter as its reference."""
    steps: list[float] = []
    add = KLCallback.on_pre_optimizer_step

    def count(self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        steps.append(state.global_step)
        add(self, args, state, *rest, **kwargs)

    monkeypatch.setattr(KLCallback, "on_pre_optimizer_step", count)
    tune(recipe_of(task, train={"max_steps": 3, "micro_batch_size": 8}), directory=tmp_path / "run")
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_mean_and_draws_stand_side_by_side(finished: Callable[[str], Run], task: str, tmp_path: Path) -> None:
    run = finished(task)
    evaluation = evaluate(run.path, directory=tmp_path / "scores", samples=4)
    sampled = evaluation.sampled
    assert sampled is not None
    assert sampled.draws == 4
    assert sampled.metrics.keys() - evaluation.metrics.keys() == {"epistemic", "aleatoric"}
    assert {"accuracy", "nll", "ece", "brier"} <= evaluation.metrics.keys()
    assert sampled["epistemic"] > 0
    saved = json.loads((tmp_path / "scores" / "evaluation.json").read_text())["after"]
    assert saved["sampled"]["metrics"]["nll"]["value"] == sampled["nll"]
    page = (tmp_path / "scores" / "report.html").read_text()
    assert "Average of 4 draws" in page
    assert "Posterior mean" in page
    assert "Epistemic uncertainty" in page
    rows = read_rows(tmp_path / "scores" / "predictions.jsonl")
    mean = np.mean([row["sampled"]["epistemic"] for row in rows])
    assert mean == pytest.approx(sampled["epistemic"], rel=1e-6)
    # tune has written the same for its own evaluation, with the usual number of draws
    after = json.loads((run / "evaluation.json").read_text())
    assert after["after"]["sampled"]["draws"] == 8
    assert "sampled" not in after["before"]
    assert "Average of 8 draws" in (run / "report.html").read_text()


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_predict_says_how_sure_it_is(finished: Callable[[str], Run], task: str) -> None:
    run, rows = finished(task), inputs_of(task)
    found = list(predict(run.path, rows, samples=8))
    for row in found:
        assert 0 < row["confidence"] <= 1
        assert row["confidence"] == pytest.approx(max(row["probs"].values()), abs=1e-6)
        assert row["total"] == pytest.approx(row["aleatoric"] + row["epistemic"], abs=1e-9)
        assert row["epistemic"] > 0
    assert list(predict(run.path, rows, samples=8)) == found  # the run's seed makes the draws
    for one, other in zip(predict(run.path, rows, samples=8, batch_size=2), found, strict=True):
        assert one["epistemic"] == pytest.approx(other["epistemic"], rel=1e-3)
    plain = list(predict(run.path, rows))
    assert "epistemic" not in plain[0]
    assert plain[0]["probs"] != found[0]["probs"]


def test_the_averaged_choice_is_that_of_the_exported_ensemble(
    finished: Callable[[str], Run], tmp_path: Path, tiny_lm: Path
) -> None:
    run, rows = finished("choice"), inputs_of("choice")
    export(run.path, "lora", tmp_path / "ensemble", samples=3)
    members = sorted((tmp_path / "ensemble").iterdir())
    assert [m.name for m in members] == ["sample-0", "sample-1", "sample-2"]
    found = list(predict(run.path, rows, samples=3))
    data = str(write_jsonl(tmp_path / "rows.jsonl", colour_rows(5, seed=9)))
    recipe = Recipe.from_yaml(run / "recipe.yaml")
    probs = []
    for member in members:
        assert isinstance(PeftConfig.from_pretrained(str(member)), LoraConfig)
        scored = evaluate(
            str(tiny_lm), data, adapter=member, task="choice", labels=recipe.labels, template=recipe.template
        )
        probs.append([[row["probs"][word] for word in WORDS] for row in scored.predictions])
    ours = [[row["probs"][word] for word in WORDS] for row in found]
    np.testing.assert_allclose(np.mean(probs, axis=0), ours, atol=2e-5)


def test_export_of_the_mean_is_a_plain_lora(finished: Callable[[str], Run], tmp_path: Path) -> None:
    run = finished("choice")
    export(run.path, "lora", tmp_path / "mean")
    model, *_ = load_run(run.path)
    weights = load_file(tmp_path / "mean" / "adapter_model.safetensors")
    for name, layer in model.named_modules():
        if layer in tuner_of(model).layers():
            assert torch.equal(weights[f"{name}.lora_A.weight"], layer.blora_A["default"].weight)
    assert len(weights) == 2 * len(tuner_of(model).layers())


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_text_is_written_from_the_mean(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    assert evaluate(run.path).sampled is None
    with pytest.raises(InputError, match=f"task is {task}, which answers from the mean"):
        next(iter(predict(run.path, inputs_of(task), samples=8)))
    with pytest.raises(InputError, match="Leave --samples out"):
        evaluate(run.path, samples=8)


def test_other_adapters_have_nothing_to_draw(
    recipe_of: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("choice", adapter="lora", adapter_args={"r": 2}, train={"max_steps": 1})
    run = tune(recipe, directory=tmp_path / "run")
    with pytest.raises(InputError, match=r"'lora' has none\. Train with --adapter bayesian-lora"):
        next(iter(predict(run.path, inputs_of("choice"), samples=8)))
    with pytest.raises(InputError, match="--to lora writes the posterior of a Bayesian adapter"):
        export(run.path, "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="needs --to lora"):
        export(run.path, "peft", tmp_path / "out", samples=2)
    rows = write_jsonl(tmp_path / "rows.jsonl", inputs_of("choice"))
    assert run_app(["predict", str(run.path), "--input", str(rows), "--samples", "4", "--quiet"]) == 2
    assert "bayesian-lora" in capsys.readouterr().err


@pytest.mark.parametrize("n", [0, -3])
def test_a_number_of_draws_below_one_is_refused(finished: Callable[[str], Run], n: int, tmp_path: Path) -> None:
    run = finished("choice")
    for work in (
        lambda: evaluate(run.path, samples=n),
        lambda: list(predict(run.path, inputs_of("choice"), samples=n)),
        lambda: export(run.path, "lora", tmp_path / "out", samples=n),
    ):
        with pytest.raises(InputError, match="at least 1"):
            work()


def test_the_command_line(finished: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished("choice")
    assert (
        run_app(["evaluate", str(run.path), "--samples", "3", "-o", str(tmp_path / "scores"), "--quiet", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["sampled"]["draws"] == 3
    rows = write_jsonl(tmp_path / "rows.jsonl", inputs_of("choice"))
    assert run_app(["predict", str(run.path), "--input", str(rows), "--samples", "3", "--quiet"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 5
    assert all({"confidence", "epistemic"} <= answer.keys() for answer in answers)
    assert (
        run_app(["export", str(run.path), "--to", "lora", "--samples", "2", "-o", str(tmp_path / "two"), "--quiet"])
        == 0
    )
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["sample-0", "sample-1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"flow": "maf"}, "free mean"),
        ({"max_lambda": -1}, "max_lambda"),
        ({"lamda": 0.1}, "max_lambda"),
        ({"target_modules": ["nothing"]}, "q_proj"),
    ],
)
def test_arguments_that_do_not_fit_are_input_errors(
    recipe_of: Callable[..., Recipe], tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        tune(recipe_of("choice", adapter_args=arguments), directory=tmp_path / "run")


def test_weight_decay_spares_the_noise(
    recipe_of: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[tuple[float, int]] = []
    make = training.RunTrainer.create_optimizer

    def watch(self: Any, model: Any = None) -> Any:
        optimizer = make(self, model)
        names = {id(p): n for n, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            groups.extend((group["weight_decay"], "blora_posterior_" in names[id(p)]) for p in group["params"])
        return optimizer

    monkeypatch.setattr(training.RunTrainer, "create_optimizer", watch)
    tune(recipe_of("choice", train={"max_steps": 1, "weight_decay": 0.1}), directory=tmp_path / "run")
    assert set(groups) == {(0.1, False), (0.0, True)}


def test_a_diverging_run_ends_with_advice(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    from acclimate.errors import AcclimateError

    recipe = recipe_of("choice", train={"max_steps": 8, "lr": 1e30, "lr_schedule": "constant", "max_grad_norm": 0.0})
    with pytest.raises(AcclimateError, match="learning rate") as caught:
        tune(recipe, directory=tmp_path / "run")
    assert caught.value.exit_code == 2
