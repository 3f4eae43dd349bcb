"""The jobs end to end on tiny models: a run helps, says what it did, and everything that reads it agrees."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import acclimate.report
from acclimate import evaluate, export, load_run, predict, tune
from acclimate.errors import AcclimateError, InputError
from acclimate.models import load_model
from acclimate.recipe import Recipe
from acclimate.runs import Interrupted, Run, free_directory, read_json, read_rows
from conftest import WORDS, colour_rows, signal_at, task_rows, write_jsonl
from fresh_process import logits_in_a_fresh_process

TRAIN, TEST = colour_rows(48), colour_rows(30, seed=1)


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory, tiny_lm: Path, tiny_encoder: Path) -> Callable[..., Recipe]:
    """Recipe of a task on the colour data: 45 steps, which the tiny models learn in."""
    where = tmp_path_factory.mktemp("data")
    files = {
        task: [str(write_jsonl(where / f"{task}-{name}.jsonl", task_rows(task, rows))) for name, rows in (("train", TRAIN), ("test", TEST))]
        for task in ("choice", "classify", "sft", "dpo")
    }  # fmt: skip

    def make(task: str, **fields: Any) -> Recipe:
        rate = 2e-2 if task == "choice" else 1e-2
        train = {"epochs": 15, "lr": rate, "warmup": 0.1, **fields.pop("train", {})}
        model = str(tiny_encoder if task == "classify" else tiny_lm)
        return Recipe(
            **{
                "model": model,
                "data": files[task][0],
                "eval_data": files[task][1],
                "task": task,
                "train": train,
                **fields,
            }
        )

    return make


@pytest.fixture(scope="module")
def finished(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A finished run of a task, made once; tests do not change it."""
    made: dict[str, Run] = {}
    where = tmp_path_factory.mktemp("runs")

    def get(task: str) -> Run:
        if task not in made:
            made[task] = tune(recipe_of(task), directory=where / task)
        return made[task]

    return get


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has its own tests and takes a third of a tiny run."""
    monkeypatch.setattr(acclimate.report, "write_report", lambda path: path)


def metric(run: Run, when: str, name: str) -> float:
    return read_json(run / f"evaluation_{when}.json")["metrics"][name]["value"]


def adapter_weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- a run helps, and says so ---


@pytest.mark.parametrize("task", ["choice", "classify", "sft", "dpo"])
def test_a_run_learns_the_task(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    assert run.finished
    # over the whole vocabulary the frozen, nearly uniform head of the tiny model bounds what can be gained
    gain = metric(run, "before", "nll") - metric(run, "after", "nll")
    assert gain > 0.5
    if task in ("choice", "classify"):
        assert metric(run, "after", "accuracy") > metric(run, "before", "accuracy") + 0.25
    if task == "sft":
        assert metric(run, "after", "accuracy") > metric(run, "before", "accuracy") + 0.9
    if task == "dpo":
        assert metric(run, "after", "margin") > metric(run, "before", "margin") + 1
    evaluation = read_json(run / "evaluation.json")
    difference = evaluation["differences"][evaluation["metric"]]
    expected = metric(run, "after", evaluation["metric"]) - metric(run, "before", evaluation["metric"])
    assert difference["value"] == pytest.approx(expected, abs=1e-9)
    assert (difference["low"] > 0) if evaluation["higher_is_better"] else (difference["high"] < 0)


@pytest.mark.parametrize("task", ["choice", "classify", "sft", "dpo"])
def test_the_directory_holds_what_is_promised_and_nothing_half_written(
    finished: Callable[[str], Run], task: str
) -> None:
    run = finished(task)
    assert {item.name for item in run.path.iterdir()} == {
        ".lock", "recipe.yaml", "run.json", "metrics.jsonl", "checkpoints", "adapter", "predictions.jsonl",
        "predictions_before.jsonl", "evaluation.json", "evaluation_before.json", "evaluation_after.json", "report.html",
    }  # fmt: skip
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {item.name for item in (run / "adapter").iterdir()}
    assert [item.name for item in run.path.rglob("*") if "partial" in item.name] == []
    # nothing that must be unpickled stands beside the weights
    assert list((run / "adapter").glob("*.bin")) == []
    assert list(run.path.rglob("training_args.bin")) == []
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_run_json_says_what_happened(finished: Callable[[str], Run], recipe_of: Callable[..., Recipe]) -> None:
    run = finished("choice")
    info = read_json(run / "run.json")
    assert info == run.info
    assert (info["status"], info["stage"], info["seed"], info["steps"]) == ("done", "done", 0, 45)
    assert info["method"] == {"task": "choice", "adapter": "lora", "init": "default", "optimizer": "adamw"}
    facts = {k: info["data"][k] for k in ("source", "eval_source", "train_rows", "eval_rows", "skipped", "overlap")}
    assert facts == {
        "source": "choice-train.jsonl", "eval_source": "choice-test.jsonl", "train_rows": 48, "eval_rows": 30,
        "skipped": 0, "overlap": 0,
    }  # fmt: skip
    assert info["warnings"] == []
    # rank 8 on q, k, v, o, gate, up, down of two layers: r (in + out)
    sizes = [(48, 48), (48, 24), (48, 24), (48, 48), (48, 96), (48, 96), (96, 48)]
    assert info["parameters"]["trainable"] == 2 * sum(8 * (a + b) for a, b in sizes)
    assert info["adapter_bytes"] == (run / "adapter" / "adapter_model.safetensors").stat().st_size
    assert set(info["timings"]) == {
        "load data",
        "load model",
        "evaluate before",
        "train",
        "save",
        "evaluate after",
        "report",
    }
    assert 0 < info["train_seconds"] <= info["timings"]["train"]
    assert info["peak_memory_bytes"] > 50 * 2**20
    assert info["artifacts"] == {"adapter": "adapter/"}
    assert Recipe.from_yaml(run / "recipe.yaml").labels == {"blue": "blue", "green": "green", "red": "red"}
    assert str(Path.home()) not in json.dumps({k: v for k, v in info.items() if k != "model"})


def test_metrics_have_a_line_a_step_and_the_loss_falls(finished: Callable[[str], Run]) -> None:
    rows = read_rows(finished("choice") / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert all(math.isfinite(row["loss"]) and row["learning_rate"] >= 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(3), abs=0.2)
    assert np.mean([row["loss"] for row in rows[-5:]]) < 0.6
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    rates = [row["learning_rate"] for row in rows]
    assert max(rates) == pytest.approx(2e-2, rel=0.05)
    assert rates.index(max(rates)) in (4, 5, 6)  # a tenth of 45 steps of warm-up


@pytest.mark.parametrize("task", ["choice", "classify", "sft", "dpo"])
def test_predictions_are_those_the_metrics_were_computed_from(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    for name, when in (("predictions.jsonl", "after"), ("predictions_before.jsonl", "before")):
        rows = read_rows(run / name)
        assert len(rows) == 30 == read_json(run / f"evaluation_{when}.json")["n"]
        weights = np.array([row.get("tokens", 1) for row in rows], dtype=float)
        nll = np.average([row["nll"] for row in rows], weights=weights)
        assert metric(run, when, "nll") == pytest.approx(nll, abs=1e-9)
        if task != "sft":
            assert metric(run, when, "accuracy") == pytest.approx(np.mean([row["correct"] for row in rows]))
        if task in ("choice", "classify"):
            assert [row["label"] for row in rows] == [row["label"] for row in TEST]


# --- evaluating and predicting ---


@pytest.mark.parametrize("task", ["choice", "classify", "sft", "dpo"])
def test_evaluating_a_run_or_its_adapter_repeats_its_own_score(
    finished: Callable[[str], Run], recipe_of: Callable[..., Recipe], task: str
) -> None:
    run, recipe = finished(task), recipe_of(task)
    own = read_json(run / "evaluation_after.json")["metrics"]
    assert evaluate(run.path).metrics == own
    labels = {"labels": Recipe.from_yaml(run / "recipe.yaml").labels} if task in ("choice", "classify") else {}
    assert evaluate(recipe.model, recipe.eval_data, adapter=run / "adapter", task=task, **labels).metrics == own
    if task != "classify":  # whose head is random before
        before = read_json(run / "evaluation_before.json")["metrics"]
        assert evaluate(recipe.model, recipe.eval_data, task=task, **labels).metrics == before


def test_a_run_that_held_out_rows_finds_them_again(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    run = tune(recipe_of("choice", eval_data=None, seed=4, train={"max_steps": 2}), directory=tmp_path / "run")
    assert run.info["data"]["train_rows"] + run.info["data"]["eval_rows"] == 48
    assert run.info["data"]["eval_rows"] == 5
    assert evaluate(run.path).metrics == read_json(run / "evaluation_after.json")["metrics"]


def test_a_run_that_sampled_its_evaluation_rows_scores_the_same_ones(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    run = tune(recipe_of("choice", max_eval_samples=11, train={"max_steps": 1}), directory=tmp_path / "run")
    rows = evaluate(run.path).predictions
    assert len(rows) == 11
    assert [row["id"] for row in rows] == [row["id"] for row in read_rows(run / "predictions.jsonl")]
    assert evaluate(run.path).metrics == read_json(run / "evaluation_after.json")["metrics"]


def test_evaluation_writes_its_directory(finished: Callable[[str], Run], tmp_path: Path) -> None:
    result = evaluate(finished("choice").path, directory=tmp_path / "scores")
    assert {item.name for item in (tmp_path / "scores").iterdir()} == {
        "evaluation.json",
        "predictions.jsonl",
        "report.html",
    }
    assert read_json(tmp_path / "scores" / "evaluation.json")["after"]["metrics"] == result.metrics
    assert read_rows(tmp_path / "scores" / "predictions.jsonl") == result.predictions
    with pytest.raises(InputError, match=r"is not empty\. Choose another place with -o"):
        evaluate(finished("choice").path, directory=tmp_path / "scores")


def test_evaluating_takes_dotted_settings(recipe_of: Callable[..., Recipe], tmp_path: Path, tiny_lm: Path) -> None:
    rows = [{"text": row["text"], "colour": row["label"]} for row in TEST]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    settings: dict[str, Any] = {"columns.label": "colour", "max_eval_samples": 12}
    result = evaluate(str(tiny_lm), str(data), task="choice", **settings)
    assert len(result.predictions) == 12
    with pytest.raises(InputError, match="name the rows to score with --data"):
        evaluate(str(tiny_lm), task="choice")


def test_a_run_takes_no_other_adapter(finished: Callable[[str], Run], tmp_path: Path, tiny_lm: Path) -> None:
    run = finished("choice")
    with pytest.raises(InputError, match="is a run and has its own adapter"):
        evaluate(run.path, adapter=run / "adapter")
    with pytest.raises(InputError, match=r"no adapter at '.*': it has no adapter_config.json"):
        evaluate(str(tiny_lm), Recipe.from_yaml(run / "recipe.yaml").eval_data, adapter=tmp_path, task="choice")


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_predict_streams_in_order_and_agrees_with_the_evaluation(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    taken = []

    def rows() -> Any:
        for number, row in enumerate(TEST):
            taken.append(number)
            yield {"text": row["text"], "mine": number}

    answers = predict(run.path, rows(), batch_size=7)
    first = next(answers)
    assert taken == list(range(7))  # one batch is read before the first answer, not all
    found = [first, *answers]
    expected = read_rows(run / "predictions.jsonl")
    assert [row["mine"] for row in found] == list(range(30))
    assert [row["text"] for row in found] == [row["text"] for row in TEST]
    assert [row["prediction"] for row in found] == [row["prediction"] for row in expected]
    np.testing.assert_allclose([row["confidence"] for row in found], [row["confidence"] for row in expected], atol=1e-5)
    assert all(set(row) == {"text", "mine", "prediction", "confidence", "probs"} for row in found)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_predict_completes_prompts_as_greedy_generation_does(finished: Callable[[str], Run], task: str) -> None:
    run = finished(task)
    prompts = [row["text"] for row in TEST[:5]]
    found = [row["completion"] for row in predict(run.path, [{"prompt": text} for text in prompts])]
    model, tokenizer, _, _ = load_run(run.path)
    for text, completion in zip(prompts, found, strict=True):
        ids = tokenizer(text)["input_ids"]
        start = len(ids)
        with torch.no_grad():
            while len(ids) - start < 256:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    break
        assert completion == tokenizer.decode(ids[start:], skip_special_tokens=True).strip()
    if task == "sft":
        assert found == [row["label"] for row in TEST[:5]]


def test_predict_names_a_row_without_text_by_its_place_in_the_stream(finished: Callable[[str], Run]) -> None:
    rows: list[dict[str, Any]] = [{"text": row["text"]} for row in TEST[:5]] + [{"text": ""}]
    answers = predict(finished("choice").path, rows, batch_size=4)
    assert len([next(answers) for _ in range(4)]) == 4
    with pytest.raises(InputError, match="row 2 of 'input after row 4' has nothing in column 'text'"):
        next(answers)
    with pytest.raises(InputError, match=r"'input' has no column 'text'.*Columns found: body"):
        list(predict(finished("choice").path, [{"body": "x"}]))


def test_predict_reads_the_users_column_names(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"body": row["text"], "kind": row["label"]} for row in TRAIN])
    recipe = recipe_of(
        "choice", data=str(data), eval_data=str(data), columns={"text": "body", "label": "kind"}, train={"max_steps": 1}
    )
    run = tune(recipe, directory=tmp_path / "run")
    theirs = list(predict(run.path, [{"body": "the sky"}]))
    ours = list(predict(run.path, [{"text": "the sky"}]))
    assert theirs[0]["probs"] == ours[0]["probs"]
    assert theirs[0]["body"] == "the sky"


# --- taking the result elsewhere ---


def logits_elsewhere(where: Path, *pairs: tuple[Path | str, Path | str]) -> list[torch.Tensor]:
    """Logits of (model, adapter) pairs in a process that has transformers and PEFT alone."""
    where.mkdir()
    return logits_in_a_fresh_process(pairs, [list(range(5, 25))], where)


@torch.no_grad()
def logits_here(run: Run) -> torch.Tensor:
    return load_run(run.path)[0](torch.arange(5, 25)[None]).logits


def test_exports_load_without_acclimate(finished: Callable[[str], Run], tmp_path: Path, tiny_lm: Path) -> None:
    run = finished("choice")
    expected = logits_here(run)
    assert export(run.path, "peft", tmp_path / "adapter") == tmp_path / "adapter"
    assert export(run.path, "merged", tmp_path / "model") == tmp_path / "model"
    adapted, merged, base = logits_elsewhere(
        tmp_path / "logits", (tiny_lm, tmp_path / "adapter"), (tmp_path / "model", ""), (tiny_lm, "")
    )
    torch.testing.assert_close(adapted, expected, atol=0, rtol=0)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)
    assert (base - expected).abs().max() > 0.1
    # the merged model is a model like any other
    assert load_model(str(tmp_path / "model"))[1]("the sky")["input_ids"]
    assert evaluate(str(tmp_path / "model"), Recipe.from_yaml(run / "recipe.yaml").eval_data, task="choice")[
        "nll"
    ] == pytest.approx(metric(run, "after", "nll"), abs=1e-4)


def test_exports_that_cannot_be(finished: Callable[[str], Run], tmp_path: Path) -> None:
    run = finished("choice")
    with pytest.raises(InputError, match="--to is peft, merged or lora, not 'gguf'"):
        export(run.path, "gguf", tmp_path / "x")
    with pytest.raises(InputError, match="exists already"):
        export(run.path, "peft", tmp_path)
    with pytest.raises(InputError, match="no run at"):
        export(tmp_path, "merged", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# --- seeds, directories, resuming ---


def test_the_seed_decides_everything(recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None) -> None:
    def short(name: str, **fields: Any) -> Run:
        return tune(recipe_of("choice", train={"max_steps": 6}, **fields), directory=tmp_path / name)

    first, again, other = short("first", seed=1), short("again", seed=1), short("other", seed=2)
    assert same(adapter_weights(first), adapter_weights(again))
    assert not same(adapter_weights(first), adapter_weights(other))
    assert read_rows(first / "predictions.jsonl") == read_rows(again / "predictions.jsonl")
    # the rows do not depend on it, so that seeds can be compared
    assert read_rows(first / "predictions_before.jsonl") == read_rows(other / "predictions_before.jsonl")


def test_a_finished_run_is_not_overwritten_by_accident(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    recipe = recipe_of("choice", train={"max_steps": 1})
    path = tmp_path / "run"
    tune(recipe, directory=path)
    (path / "notes.txt").write_text("mine")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"}
    with pytest.raises(InputError, match=r"already holds a run \(done\). Go on with it: --resume .*--overwrite"):
        tune(recipe, directory=path)
    assert tune(directory=path, resume=True).finished  # nothing left to do
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"} == before
    tune(recipe.replace(seed=9), directory=path, overwrite=True)
    assert Run(path).info["seed"] == 9
    assert not (path / "notes.txt").exists()


def test_directories_of_others_are_left_alone(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of("choice")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "recipe.yaml").write_text("task: choice\n")  # where many keep their recipe
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"is not empty and not a run\. Choose another place with -o"):
            tune(recipe, directory=tmp_path / "project", overwrite=overwrite)
    with pytest.raises(InputError, match="is a file; a run is a directory"):
        tune(recipe, directory=tmp_path / "file")
    assert [item.name for item in (tmp_path / "project").iterdir()] == ["recipe.yaml"]


def test_a_run_that_failed_over_its_input_can_be_started_again(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    with pytest.raises(InputError, match="no column"):
        tune(recipe_of("choice", template="{missing}"), directory=tmp_path / "run")
    assert Run(tmp_path / "run").info["status"] == "failed"
    run = tune(recipe_of("choice", train={"max_steps": 1}), directory=tmp_path / "run")
    assert run.finished
    assert run.info["error"] is None


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run to resume at"):
        tune(directory=tmp_path, resume=True)
    with pytest.raises(InputError, match="no run to resume at 'None'"):
        tune(resume=True)


def test_the_next_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_of: Callable[..., Recipe], no_report: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("choice-lora", "choice-lora-2"):
        assert free_directory("choice-lora") == Path("runs") / name
        assert tune(recipe_of("choice", train={"max_steps": 1})).path == Path("runs") / name


def test_settings_go_on_top_of_a_recipe(recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None) -> None:
    settings: dict[str, Any] = {"train.max_steps": 2, "seed": 3}
    run = tune(recipe_of("choice"), directory=tmp_path / "run", **settings)
    assert (run.info["steps"], run.info["seed"]) == (2, 3)


def test_the_demonstrations_defaults_survive_settings(tiny_lm: Path, tmp_path: Path, no_report: None) -> None:
    """`tune(seed=1)` is the bundled sample with another seed, not a recipe without task and labels."""
    run = tune(
        directory=tmp_path / "run",
        model=str(tiny_lm),
        max_train_samples=16,
        max_eval_samples=20,
        train={"max_steps": 1},
    )
    recipe = Recipe.from_yaml(run / "recipe.yaml")
    assert recipe.task == "choice"
    assert recipe.template == "Request: {text}\nTopic:"
    assert isinstance(recipe.labels, dict)
    assert recipe.labels["banking"] == "bank"
    assert (run.info["data"]["train_rows"], run.info["data"]["eval_rows"]) == (16, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_a_step_and_resuming_gives_the_same_weights(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, number: int
) -> None:

    recipe = recipe_of("choice", train={"max_steps": 12, "save_every": 5})
    whole = tune(recipe, directory=tmp_path / "whole")
    assert threading.current_thread() is threading.main_thread()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with (
        signal_at(7, number),
        pytest.raises(Interrupted, match="stopped at step 7; go on with: acclimate tune --resume") as caught,
    ):
        tune(recipe, directory=tmp_path / "run")
    assert caught.value.exit_code == 130
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert Run(tmp_path / "run").info["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-7").is_dir()
    run = tune(directory=tmp_path / "run", resume=True)
    assert run.finished
    assert same(adapter_weights(run), adapter_weights(whole))
    drop = ("seconds",)
    rows = [
        [{k: v for k, v in row.items() if k not in drop} for row in read_rows(r / "metrics.jsonl")]
        for r in (run, whole)
    ]
    assert rows[0] == rows[1]


# --- methods ---

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {},
    "rslora": {},
    "vera": {"train": {"lr": 5e-2}},
    "fourierft": {"train": {"lr": 5e-2}, "adapter_args": {"n_frequency": 100}},
    "ia3": {"train": {"lr": 0.2}},
    "frameft": {"train": {"lr": None}, "adapter_args": {"n_coefficients": 200}},
    "full": {"train": {"lr": 1e-3}},
}
INITS = ["pissa", "olora", "orthogonal"]


def learned(run: Run) -> bool:
    """The loss of the last steps is well under that of the untouched model, ln 3."""
    losses = [row["loss"] for row in read_rows(run / "metrics.jsonl")]
    return float(np.mean(losses[-5:])) < 0.9 * losses[0]


def trained_and_reloaded(recipe: Recipe, where: Path) -> Run:
    run = tune(recipe, directory=where)
    assert learned(run)
    again = evaluate(run.path)
    assert again["nll"] == pytest.approx(metric(run, "after", "nll"), abs=1e-5)
    expected = read_rows(run / "predictions.jsonl")
    assert [row["prediction"] for row in again.predictions] == [row["prediction"] for row in expected]
    return run


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_adapter_trains_and_reloads(
    adapter: str, recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    run = trained_and_reloaded(recipe_of("choice", adapter=adapter, **ADAPTERS[adapter]), tmp_path / "run")
    parameters = run.info["parameters"]
    if adapter == "full":
        assert parameters["trainable"] == parameters["total"]
        assert (run / "model" / "model.safetensors").exists()
        assert not (run / "adapter").exists()
        with pytest.raises(InputError, match="has no adapter to export"):
            export(run.path, "peft", tmp_path / "x")
        export(run.path, "merged", tmp_path / "model")
        assert same(load_file(tmp_path / "model" / "model.safetensors"), load_file(run / "model" / "model.safetensors"))
    else:
        assert 0 < parameters["trainable"] < 0.3 * parameters["total"]
        export(run.path, "merged", tmp_path / "model")
        merged = load_model(str(tmp_path / "model"))[0].eval()
        with torch.no_grad():
            torch.testing.assert_close(merged(torch.arange(5, 25)[None]).logits, logits_here(run), atol=1e-5, rtol=0)


def test_every_initialisation_trains_reloads_and_is_an_ordinary_lora(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, tiny_lm: Path
) -> None:
    runs = [trained_and_reloaded(recipe_of("choice", init=init), tmp_path / init) for init in INITS]
    found = logits_elsewhere(tmp_path / "logits", *((tiny_lm, run / "adapter") for run in runs))
    for run, logits in zip(runs, found, strict=True):
        torch.testing.assert_close(logits, logits_here(run), atol=1e-5, rtol=0)
        # nothing has to be decomposed again where it is loaded, which vLLM and llama.cpp could not do
        assert read_json(run / "adapter" / "adapter_config.json")["init_lora_weights"] in (True, "orthogonal")


def test_full_fine_tuning_of_a_classifier_reloads(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    run = tune(recipe_of("classify", adapter="full", train={"lr": 3e-3}), directory=tmp_path / "run")
    assert evaluate(run.path).metrics == read_json(run / "evaluation_after.json")["metrics"]
    assert learned(run)


def test_adapter_arguments_reach_peft(recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None) -> None:
    recipe = recipe_of("choice", adapter_args={"r": 2, "target_modules": ["q_proj"]}, train={"max_steps": 1})
    run = tune(recipe, directory=tmp_path / "run")
    assert run.info["parameters"]["trainable"] == 2 * 2 * (48 + 48)
    config = read_json(run / "adapter" / "adapter_config.json")
    assert (config["r"], config["target_modules"]) == (2, ["q_proj"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter_args": {"rank": 4}}, r"adapter_args do not fit adapter 'lora': .*'rank'.*Known: .*lora_alpha"),
        ({"adapter_args": {"target_modules": ["query"]}}, r"target_modules \['query'\] match nothing in '.*'. Linear layers there: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ({"adapter_args": {"r": 0}}, "adapter 'lora' does not fit|adapter_args of 'lora'"),
        ({"adapter": "frameft", "adapter_args": {"frame_l": 3}}, "adapter_args of 'frameft': frame_l is 'auto' or an even number"),
        ({"adapter": "frameft", "adapter_args": {"n_coefficients": 10**6}}, "n_coefficients=1000000 does not fit in a layer of"),
        ({"adapter": "frameft", "adapter_args": {"target_modules": ["embed_tokens"]}}, "FrameFT adapts linear layers; module '.*embed_tokens' is a Embedding"),
        ({"adapter": "ia3", "init": "pissa"}, "init 'pissa' starts LoRA; adapter 'ia3' has its own start"),
        ({"optimizer_args": {"momentun": 1}, "optimizer": "sgd"}, "optimizer_args do not fit optimizer 'sgd': .*momentun"),
        ({"optimizer_args": {"momentun": 1}}, "optimizer_args do not fit optimizer 'adamw': .*momentun"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(
    fields: dict[str, Any], message: str, recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    with pytest.raises(InputError, match=message):
        tune(recipe_of("choice", train={"max_steps": 1}, **fields), directory=tmp_path / "run")


# name: (recipe fields, what the state of a parameter holds)
OPTIMIZERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "adamw": ({}, {"step", "exp_avg", "exp_avg_sq"}),
    "sgd": ({"adapter": "full", "train": {"lr": 0.5}, "optimizer_args": {"momentum": 0.9}}, {"momentum_buffer"}),
    "adafactor": ({"train": {"lr": 0.1}}, {"step", "row_var", "col_var"}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(
    optimizer: str, recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    fields, state = OPTIMIZERS[optimizer]
    run = tune(recipe_of("choice", optimizer=optimizer, **fields), directory=tmp_path / "run")
    assert learned(run)
    saved = torch.load(run / "checkpoints" / "checkpoint-45" / "optimizer.pt")
    assert state <= set(saved["state"][0])
    rates = [row["learning_rate"] for row in read_rows(run / "metrics.jsonl")]
    assert max(rates) == pytest.approx(fields.get("train", {}).get("lr", 2e-2), rel=0.05)


def test_one_step_of_sgd_is_the_gradient_times_the_rate(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, tiny_lm: Path
) -> None:
    """Against autograd by hand, over one batch of all rows: scaling, clipping and masks all show here."""
    train = {"max_steps": 1, "batch_size": 48, "lr": 0.1, "lr_schedule": "constant", "warmup": 0, "max_grad_norm": 0}
    run = tune(recipe_of("choice", adapter="full", optimizer="sgd", train=train), directory=tmp_path / "run")
    model, tokenizer = load_model(str(tiny_lm))
    words = [tokenizer(f" {w}")["input_ids"][0] for w in WORDS]
    loss = torch.tensor(0.0)
    for row in TRAIN:
        logits = model(torch.tensor([tokenizer(f"{row['text']}\nAnswer:")["input_ids"]])).logits[0, -1, words]
        loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(WORDS.index(row["label"]))) / len(TRAIN)
    loss.backward()
    after = load_file(run / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(after[name], parameter.detach() - 0.1 * parameter.grad, atol=1e-6, rtol=0)


# --- budgets and safety ---


def test_a_token_budget_sets_the_steps(recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None) -> None:
    run = tune(recipe_of("choice", train={"max_tokens": 2000}), directory=tmp_path / "run")
    per_step = run.info["tokens"] / run.info["steps"]
    assert run.info["steps"] == round(2000 / per_step)
    assert abs(run.info["tokens"] - 2000) <= per_step / 2
    # 16 rows a step of about 14 tokens
    lengths = [len(load_model(recipe_of("choice").model)[1](f"{row['text']}\nAnswer:")["input_ids"]) for row in TRAIN]
    assert per_step == pytest.approx(16 * np.mean(lengths), rel=0.01)


def test_a_time_budget_ends_the_run(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which every step takes exactly a tenth of a second, half a second is five steps."""
    from acclimate import training

    clock = [0.0]

    def tick() -> float:
        clock[0] += 0.1
        return clock[0]

    monkeypatch.setattr(training.time, "perf_counter", tick)
    run = tune(recipe_of("choice", train={"max_seconds": 0.45}), directory=tmp_path / "run")
    assert run.finished
    assert run.info["steps"] == 5
    assert (run / "checkpoints" / "checkpoint-5").is_dir()


@pytest.mark.parametrize("task", ["choice", "classify", "sft"])
def test_micro_batches_change_nothing_but_rounding(
    task: str, recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    """By plain gradient descent: Adam would divide the rounding of a tiny gradient by that gradient."""
    runs = []
    for micro in (None, 4):
        train = {"max_steps": 4, "micro_batch_size": micro, "lr": 0.5}
        runs.append(tune(recipe_of(task, optimizer="sgd", train=train), directory=tmp_path / str(micro)))
    one, other = (adapter_weights(run) for run in runs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)
    losses = [[row["loss"] for row in read_rows(run / "metrics.jsonl")] for run in runs]
    np.testing.assert_allclose(*losses, atol=1e-5)


@pytest.mark.parametrize("task", ["choice", "sft"])
def test_activation_checkpointing_computes_twice_and_changes_nothing(
    task: str, recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward, calls = LlamaMLP.forward, {False: 0, True: 0}
    runs = []
    for flag in (False, True):

        def counted(self: Any, x: torch.Tensor, flag: bool = flag) -> torch.Tensor:
            calls[flag] += 1
            return forward(self, x)

        monkeypatch.setattr(LlamaMLP, "forward", counted)
        train = {"max_steps": 4, "activation_checkpointing": flag}
        runs.append(tune(recipe_of(task, train=train), directory=tmp_path / str(flag)))
    assert calls[True] - calls[False] == 2 * 4  # layers, steps
    one, other = (adapter_weights(run) for run in runs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)


def test_grouping_by_length_pads_less(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate.tasks import choice

    rows = [{**row, "text": row["text"] + " and so on" * (n % 12)} for n, row in enumerate(TRAIN * 4)]
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    pack, padding = choice.pack, [0]

    def counting(*args: Any) -> dict[str, Any]:
        packed = pack(*args)
        assert packed["attention_mask"].dim() == 2  # single-token choices: ones and zeros
        padding[0] += int((packed["attention_mask"] == 0).sum())
        return packed

    monkeypatch.setattr(choice, "pack", counting)
    counts = []
    for flag in (False, True):
        padding[0] = 0
        train = {"epochs": 1, "batch_size": 4, "group_by_length": flag}
        tune(recipe_of("choice", data=str(data), train=train), directory=tmp_path / str(flag))
        counts.append(padding[0])
    assert counts[1] < 0.4 * counts[0]


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    recipe = recipe_of(
        "choice", train={"lr": 1e30, "max_steps": 10, "save_every": 1, "warmup": 0, "max_grad_norm": 0}, optimizer="sgd"
    )
    with pytest.raises(AcclimateError) as caught:
        tune(recipe, directory=tmp_path / "run")
    message = str(caught.value)
    assert "is not a finite number at step" in message
    assert "--set train.lr=2e+29" in message
    assert "--set train.max_grad_norm" in message
    assert caught.value.exit_code == 2
    info = Run(tmp_path / "run").info
    assert (info["status"], info["error"]) == ("failed", message)
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        assert f"({checkpoint.name})" in message or checkpoint.name < "checkpoint-9"
        weights = load_file(checkpoint / "adapter_model.safetensors")
        assert all(torch.isfinite(w).all() for w in weights.values())
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_loss_that_turns_nan_midway_names_the_checkpoint_kept(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate.tasks import choice

    losses, calls = choice.choice_losses, [0]

    def nan_at_the_sixth(model: Any, packed: Any) -> torch.Tensor:
        calls[0] += 1
        return losses(model, packed) * (math.nan if calls[0] == 6 else 1.0)

    monkeypatch.setattr(choice, "choice_losses", nan_at_the_sixth)
    with pytest.raises(
        AcclimateError,
        match=r"loss is not a finite number at step 6. The last good checkpoint is kept \(checkpoint-4\)",
    ):
        tune(recipe_of("choice", train={"max_steps": 10, "save_every": 2}), directory=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir()


def test_a_weight_that_is_no_number_is_not_saved(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the last loss can still spoil the weights."""
    step, calls = torch.optim.SGD.step, [0]

    def spoil_the_fourth(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        calls[0] += 1
        if calls[0] == 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = math.nan
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", spoil_the_fourth)
    with pytest.raises(AcclimateError, match=r"weight '.*lora.*' is not a finite number.*kept \(checkpoint-2\)"):
        tune(recipe_of("choice", optimizer="sgd", train={"max_steps": 4, "save_every": 2}), directory=tmp_path / "run")
    assert [item.name for item in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_model_with_nan_weights_is_refused_before_training(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None, tiny_lm: Path
) -> None:
    import shutil

    shutil.copytree(tiny_lm, tmp_path / "model")
    weights = load_file(tiny_lm / "model.safetensors")
    weights["model.norm.weight"][:] = math.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(AcclimateError, match=r"not finite|not a finite number"):
        tune(recipe_of("choice", model=str(tmp_path / "model")), directory=tmp_path / "run")


# --- what is said about the data ---


def test_rows_in_both_sets_are_counted(recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None) -> None:
    data = write_jsonl(tmp_path / "test.jsonl", [*TEST, *TRAIN[:7]])
    run = tune(recipe_of("choice", eval_data=str(data), train={"max_steps": 1}), directory=tmp_path / "run")
    assert run.info["data"]["overlap"] == 7
    assert run.info["warnings"] == ["7 of 37 evaluation rows also stand in training: the score after is too good"]


def test_overlap_looks_at_the_columns_of_the_template(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    files = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [{"question": row["text"], "label": row["label"]} for row in rows]))
        for name, rows in (("train", TRAIN), ("test", [*TEST, TRAIN[0]]))
    ]
    recipe = recipe_of("choice", data=files[0], eval_data=files[1], template="{question}?", train={"max_steps": 1})
    assert tune(recipe, directory=tmp_path / "run").info["data"]["overlap"] == 1


def test_cut_prompts_and_skipped_rows_are_counted(
    recipe_of: Callable[..., Recipe], tmp_path: Path, no_report: None
) -> None:
    rows = [*TRAIN, {"text": "grass " * 60, "label": "green"}, {"text": "", "label": "red"}]
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    data.write_text(data.read_text() + "{broken\n")
    recipe = recipe_of("choice", data=str(data), skip_bad=True, max_length=30, train={"max_steps": 1})
    run = tune(recipe, directory=tmp_path / "run")
    facts = run.info["data"]
    assert (facts["skipped"], facts["truncated_train"], facts["truncated_eval"], facts["train_rows"]) == (2, 1, 0, 49)
    assert "2 bad rows were left out" in run.info["warnings"]
    assert any(
        "lost their beginning (answers are whole): 1 in training, 0 in evaluation" in text
        for text in run.info["warnings"]
    )


def test_a_run_that_is_not_trained_cannot_be_used(finished: Callable[[str], Run], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run at"):
        load_run(tmp_path)
    for name in ("run.json", "recipe.yaml"):
        (tmp_path / name).write_bytes((finished("choice") / name).read_bytes())
    with pytest.raises(InputError, match=r"is not trained to the end\. Go on with: acclimate tune --resume"):
        load_run(tmp_path)
