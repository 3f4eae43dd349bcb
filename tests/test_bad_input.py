"""Each thing a user can get wrong, through the command line: the message, the exit code, and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acclimate import training
from acclimate.cli.common import run_app
from acclimate.errors import MissingError
from conftest import colour_rows, write_jsonl
from disks import read_only, tmpfs

TRAIN, TEST = colour_rows(48), colour_rows(30, seed=1)
Tune = Callable[..., tuple[int, str]]


@pytest.fixture
def tune(tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Run `acclimate tune` on the colours with options on top; (exit code, all that was printed, white space joined)."""

    def call(
        *options: str,
        data: Path | str | None = None,
        eval_data: Path | str | None = None,
        task: str | None = "choice",
        model: Path | str | None = None,
    ) -> tuple[int, str]:
        command = [
            "tune",
            "--model",
            str(model or tiny_lm),
            "--data",
            str(data or colour_files[0]),
            "--eval-data",
            str(eval_data or colour_files[1]),
        ]
        command += ["--task", task] if task else []
        capsys.readouterr()
        command += [] if "-o" in options else ["-o", str(tmp_path / "run")]
        code = run_app([*command, "--set", "train.max_steps=1", *options])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert (code == 0) or (out == "" and err.strip() != "")
        return code, " ".join((out + err).split())

    return call


def rows_file(where: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    return write_jsonl(where / name, rows)


# --- the recipe ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "adaptor=lora"], "unknown key 'adaptor'. Did you mean 'adapter'?"),
        (["--set", "lr=1e-3"], "unknown key 'lr'. Did you mean 'train.lr'?"),
        (["--set", "train.epoch=3"], "unknown key 'train.epoch'. Did you mean 'train.epochs'?"),
        (["--set", "train.lr=fast"], "recipe key 'train.lr': input should be a valid number, unable to parse string as a number, but got 'fast'"),
        (["--set", "train.batch_size=-1"], "recipe key 'train.batch_size': input should be greater than 0, but got -1"),
        (["--set", "train.lr"], "--set takes key=value, not 'train.lr'"),
        (["--set", "labels=[a"], "--set labels=[a cannot be read as YAML"),
        (["--adapter", "lroa"], "Unknown adapter 'lroa'. Did you mean 'lora'?"),
        (["--optimizer", "adam"], "Unknown optimizer 'adam'. Did you mean 'adamw'?"),
        (["--adapter", "full", "--init", "pissa"], "init 'pissa' starts an adapter, but adapter is 'full'"),
        (["--set", "train.batch_size=16", "--set", "train.micro_batch_size=5"], "train.micro_batch_size 5 must divide 16"),
        (["--set", "train.precision=fp16"], "precision fp16 does not train on a CPU"),
        (["--set", "max_length=300"], "max_length 300 is more than the model's context of 256 tokens"),
        (["--set", "template={body}"], "has no column 'body' (needed by task 'choice'). Columns found: text, label"),
        (["--set", "template=Say {text"], "template 'Say {text' cannot be read"),
        (["--set", "adapter_args.rank=4"], "adapter_args do not fit adapter 'lora'"),
    ],
)  # fmt: skip
def test_recipes(tune: Tune, options: list[str], message: str) -> None:
    code, text = tune(*options)
    assert code == 2
    assert f"error: {message}" in text or message in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"adapter: [lora", "cannot read recipe"),
        (b"- a\n- b\n", "must be a mapping of keys to values, not a list"),
        (b"model: caf\xe9", "is not UTF-8 text"),
        (b"adaptor: lora", "unknown key 'adaptor'. Did you mean 'adapter'?"),
        (None, "no recipe at"),
    ],
)
def test_recipe_files(tune: Tune, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    code, text = tune(str(path))
    assert code == 2
    assert message in text


def test_own_data_need_a_task(tune: Tune) -> None:
    code, text = tune(task=None)
    assert code == 2
    assert "say what to learn from your data: task (--task) is one of sft, classify, choice, dpo" in text


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "tpu"])
def test_unknown_devices(tune: Tune, device: str) -> None:
    code, text = tune("--set", f"device={device}")
    assert code == 2
    assert f"unknown device '{device}'. Known: auto, cpu, cuda, mps" in text


def test_a_device_that_is_not_here(tune: Tune) -> None:
    import torch

    absent = "mps" if torch.cuda.is_available() else "cuda"
    code, text = tune("--set", f"device={absent}")
    assert code == 3
    assert f"device '{absent}' is not here. Available: " in text


# --- the data ---


@pytest.mark.parametrize(
    ("task", "missing"), [("choice", "text"), ("classify", "text"), ("sft", "prompt"), ("dpo", "prompt")]
)
def test_a_missing_column_lists_the_columns_found(tune: Tune, tmp_path: Path, task: str, missing: str) -> None:
    data = rows_file(tmp_path, [{"body": "x", "label": name} for name in ("a", "b", "a")])
    code, text = tune(data=data, eval_data=data, task=task)
    assert code == 2
    assert f"'rows.jsonl' has no column '{missing}' (needed by task '{task}'). Columns found: body, label" in text
    assert f"Map your names with --set columns.{missing}=YOUR_COLUMN" in text


def test_an_empty_file(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for options in ({"data": tmp_path / "rows.jsonl"}, {"eval_data": tmp_path / "rows.jsonl"}):
        code, text = tune(**options)
        assert code == 2
        assert f"no rows in '{tmp_path / 'rows.jsonl'}'" in text


def test_one_broken_line_in_ten_thousand(tune: Tune, tmp_path: Path) -> None:
    path = rows_file(tmp_path, colour_rows(10_000))
    lines = path.read_text().splitlines()
    lines[7_000] = lines[7_000][:-5]
    path.write_text("\n".join(lines))
    code, text = tune(data=path)
    assert code == 2
    assert f"'{path}' line 7001 is not JSON" in text
    assert "leave such rows out with --skip-bad" in text
    code, text = tune("--skip-bad", "--set", "max_train_samples=50", data=path)
    assert code == 0
    assert "note: 1 bad rows were left out" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"] == 1


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_a_label_outside_the_set(tune: Tune, tmp_path: Path, task: str) -> None:
    held_out = rows_file(tmp_path, [*TEST[:4], {"text": "the leaf", "label": "grean"}])
    code, text = tune(eval_data=held_out, task=task)
    assert code == 2
    assert (
        "row 5 of 'rows.jsonl': label 'grean' is not in the label set. Did you mean 'green'? Labels: blue, green, red"
        in text
    )


def test_answers_are_never_cut(tune: Tune, tmp_path: Path) -> None:
    rows = [{"prompt": "say it", "completion": " " + "red " * 300}, {"prompt": "the sky", "completion": " blue"}]
    data = rows_file(tmp_path, rows)
    code, text = tune(data=data, eval_data=data, task="sft")
    assert code == 2
    assert "the answer of row 1 of 'rows.jsonl' has " in text
    assert "more than the limit of 256. Answers are never cut: raise max_length, or shorten the row" in text


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_texts_longer_than_the_context_are_counted(tune: Tune, tmp_path: Path, task: str) -> None:
    data = rows_file(tmp_path, [*TRAIN, *({"text": "grass " * 300, "label": "green"} for _ in range(3))])
    code, text = tune(data=data, task=task)
    assert code == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert (facts["truncated_train"], facts["truncated_eval"]) == (3, 0)
    assert ": 3 in training, 0 in evaluation." in text


def test_what_is_said_of_a_cut_text_is_true(tune: Tune, tmp_path: Path) -> None:
    """`choice` cuts the start of a prompt, so that the question and the answer stay; `classify` the end, as is usual."""
    data = rows_file(tmp_path, [*TRAIN, {"text": "grass " * 300, "label": "green"}])
    for task, what in (
        ("choice", "prompts longer than the limit lost their beginning (answers are whole)"),
        ("classify", "texts longer than the limit lost their end"),
    ):
        code, text = tune("--overwrite", data=data, task=task)
        assert code == 0
        assert f"{what}: 1 in training, 0 in evaluation. Raise max_length to keep them whole" in text


def test_not_utf8(tune: Tune, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"text,label\nthe rose,red\ncaf\xe9,blue\n")
    code, text = tune(data=path)
    assert code == 2
    assert f"'{path}' is not UTF-8: byte 0xe9 in line 3. Convert it, e.g. iconv -f latin1 -t utf-8" in text


def test_duplicate_ids(tune: Tune, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"id": n % 40, **row} for n, row in enumerate(TRAIN)])
    code, text = tune(data=data)
    assert code == 2
    assert "'rows.jsonl' has 8 duplicate ids, e.g. '0' 2 times" in text


def test_evaluation_rows_that_stand_in_training(tune: Tune, tmp_path: Path) -> None:
    held_out = rows_file(tmp_path, [*TEST, *TRAIN[5:16]])
    code, text = tune(eval_data=held_out)
    assert code == 0
    assert "note: 11 of 41 evaluation rows also stand in training: the score after is too good" in text
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["data"]["overlap"] == 11
    assert info["warnings"] == ["11 of 41 evaluation rows also stand in training: the score after is too good"]
    assert "11 of 41 evaluation rows" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_no_data_file(tune: Tune) -> None:
    code, text = tune(data="missing.csv")
    assert code == 2
    assert "no data file at 'missing.csv'" in text


def test_questions_in_a_csv(tune: Tune, tmp_path: Path) -> None:
    """CSV has no lists, and a text is a sequence of letters: these must not become the choices."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,choices,answer\nthe sky,red;blue,1\nthe rose,red;blue,0\n")
    code, text = tune(data=path, eval_data=path)
    assert code == 2
    assert "row 1 of 'rows.csv': 'choices' must be a list, not 'red;blue'" in text


def test_chats_for_a_model_without_template(tune: Tune, tmp_path: Path, tiny_lm: Path) -> None:
    shutil.copytree(tiny_lm, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    data = rows_file(
        tmp_path, [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 3
    )
    code, text = tune(data=data, eval_data=data, task="sft", model=tmp_path / "model")
    assert code == 2
    assert "row 1 of 'rows.jsonl': these are chat messages, but this model has no chat template" in text


# --- the model ---


def test_model_directories(tune: Tune, tmp_path: Path, tiny_lm: Path) -> None:
    model = tmp_path / "model"
    code, text = tune(model=model)
    assert code == 2
    assert f"no model at '{model}'" in text
    model.mkdir()
    code, text = tune(model=model)
    assert code == 2
    assert "is not a model directory: it has no config.json" in text
    shutil.copy(tiny_lm / "config.json", model)
    code, text = tune(model=model)
    assert code == 2
    assert f"model directory '{model}' has no safetensors weights (found no weights)" in text
    code, text = tune(model="smollm")
    assert code == 2
    assert "no model 'smollm'. Did you mean 'smollm2'?" in text


def test_target_modules_that_match_nothing(tune: Tune) -> None:
    code, text = tune("--set", "adapter_args.target_modules=[query, value]")
    assert code == 2
    assert "target_modules ['query', 'value'] match nothing in" in text
    assert "Linear layers there: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in text


def test_a_loss_that_is_no_number(tune: Tune, tmp_path: Path) -> None:
    options = [
        "--set",
        "train.lr=1e30",
        "--set",
        "train.max_steps=9",
        "--set",
        "train.save_every=1",
        "--set",
        "train.max_grad_norm=0",
    ]
    code, text = tune(*options, "--optimizer", "sgd")
    assert code == 2
    assert "is not a finite number at step" in text
    assert "The last good checkpoint is kept (checkpoint-" in text
    assert "Try a lower learning rate (--set train.lr=2e+29)" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


# --- where it is written ---


def test_places_that_cannot_be_written(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    code, text = tune()
    assert code == 2
    assert f"'{tmp_path / 'run'}' is not empty and not a run. Choose another place with -o" in text
    assert [item.name for item in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_read_only_place(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    with read_only(tmp_path / "place"):
        code, text = tune("-o", str(tmp_path / "place" / "run"))
    assert code == 3
    assert f"cannot write to '{tmp_path / 'place' / 'run'}'" in text
    assert "Choose another place with -o" in text


def test_a_disk_that_fills_during_training_and_a_run_that_goes_on(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--set", "train.max_steps=8", "--set", "train.save_every=2", "--set", "train.keep_checkpoints=9"]
    assert tune(*options, "-o", str(tmp_path / "whole"))[0] == 0
    disk, save = tmp_path / "disk", training.RunTrainer._save_checkpoint

    with tmpfs(disk, "8m") as mounted:

        def fill_before_the_third(self: Any, *args: Any) -> None:
            if self.state.global_step == 6 and mounted:
                (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 50_000))
            if self.state.global_step == 6 and not mounted:
                raise MissingError(f"no space left on the disk of '{disk}'")
            save(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(training.RunTrainer, "_save_checkpoint", fill_before_the_third)
            code, text = tune(*options, "-o", str(disk / "run"))
        assert code == 3
        assert f"no space left on the disk of '{disk}" in text
        assert json.loads((disk / "run" / "run.json").read_text())["status"] in ("failed", "running")
        assert {item.name for item in (disk / "run" / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-4"}
        (disk / "ballast").unlink(missing_ok=True)
        assert run_app(["tune", "--resume", str(disk / "run"), "--quiet"]) == 0
        weights = [
            (run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (disk / "run", tmp_path / "whole")
        ]
        assert weights[0] == weights[1]


def test_a_message_may_hold_what_rich_takes_for_markup(tune: Tune) -> None:
    code, text = tune(data="[bold]rows[/bold].csv")
    assert code == 2
    assert "no data file at '[bold]rows[/bold].csv'" in text
