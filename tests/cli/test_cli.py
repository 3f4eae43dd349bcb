"""The command line: what each verb prints, where, and how it exits."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acclimate import cli
from acclimate.cli.common import bytes_text, metric_text, run_app, seconds_text
from conftest import WORDS, colour_rows, write_jsonl

VERBS = ["tune", "evaluate", "predict", "chat", "compare", "export", "methods", "bench", "models", "doctor"]
TEST = colour_rows(30, seed=1)


@pytest.fixture(scope="module")
def arguments(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run that takes a second."""
    where = tmp_path_factory.mktemp("data")
    files = [str(write_jsonl(where / f"{n}.jsonl", rows)) for n, rows in (("train", colour_rows(48)), ("test", TEST))]
    return [
        "--model", str(tiny_lm), "--data", files[0], "--eval-data", files[1], "--task", "choice",
        "--set", "train.epochs=8", "--set", "train.lr=1e-2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "colours"
    assert run_app(["tune", *arguments, "-o", str(path), "--quiet"]) == 0
    return path


@pytest.fixture(scope="module")
def sft_run(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sft")
    rows = [{"prompt": row["text"], "completion": f" {row['label']}"} for row in colour_rows(48)]
    data = str(write_jsonl(where / "rows.jsonl", rows))
    options = ["--model", str(tiny_lm), "--data", data, "--eval-data", data, "--task", "sft", "--set", "train.lr=1e-2"]
    assert run_app(["tune", *options, "--set", "train.epochs=15", "-o", str(where / "run"), "--quiet"]) == 0
    return where / "run"


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run_app(list(command))
    out, err = capsys.readouterr()
    return code, out, err


# --- help and mistakes ---


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    for flag in ("--help", "-h"):
        code, out, err = called(capsys, verb, flag)
        assert (code, err) == (0, "")
        assert "Usage: " in out
        if verb == "models":  # a group; its verbs have the examples
            code, out, _ = called(capsys, verb, "add", flag)
        assert f"acclimate {verb} " in out or f"acclimate {verb}\n" in out.replace(" \n", "\n")


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "--help")
    assert code == 0
    assert all(f" {verb} " in out for verb in VERBS)


def test_no_verb_shows_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys)
    assert code == 2
    assert "Usage: " in out + err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["tun"], "No such command 'tun'"),
        (["tune", "--adaptor", "lora"], "No such option"),
        (["tune", "--seed", "one"], "Invalid value for '--seed': Input should be a valid integer"),
        (["evaluate"], "Missing argument"),
        (["export", "somewhere"], "Missing option"),
        (["tune", "a.yaml", "b.yaml"], "unexpected extra argument"),
        (["models", "ad"], "No such command 'ad'"),
    ],
)
def test_wrong_commands_exit_2(capsys: pytest.CaptureFixture[str], command: list[str], message: str) -> None:
    code, out, err = called(capsys, *command)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_the_exit_code_is_that_of_the_process() -> None:
    for command, code in ((["methods", "--stage", "adaptr"], 2), (["methods", "--quiet"], 0)):
        result = subprocess.run([sys.executable, "-m", "acclimate", *command], capture_output=True, text=True)
        assert result.returncode == code
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    assert "error: no stage" not in result.stderr


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="acclimate")
    assert script.load() is cli.main


def test_a_bug_keeps_its_traceback_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import acclimate.methods

    def broken() -> None:
        raise AssertionError("this cannot be")

    monkeypatch.setattr(acclimate.methods, "all_methods", broken)
    code, out, err = called(capsys, "methods")
    assert (code, out) == (1, "")
    assert "Traceback" in err
    assert "AssertionError: this cannot be" in err
    assert "This is a bug in acclimate" in err


def test_ctrl_c_exits_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import acclimate.methods

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(acclimate.methods, "all_methods", interrupted)
    code, _, err = called(capsys, "methods")
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_help_and_import_are_cheap() -> None:
    """What makes them slow is importing the large libraries, so that is what is tested."""
    heavy = {"torch", "transformers", "peft", "trl", "datasets", "numpy", "sklearn"}
    run = "from acclimate.cli.common import run_app\nassert run_app(['{}']) == 0\n"
    # Typer itself looks at pydantic when it calls a verb
    cases = [
        ("import acclimate\n", heavy | {"pydantic"}),
        (run.format("--help"), heavy | {"pydantic"}),
        (run.format("methods"), heavy),
    ]
    for code, unwanted in cases:
        code += f"import sys\nprint(sorted({unwanted} & set(sys.modules)), file=sys.stderr)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stderr.strip() == "[]"


def test_the_lazy_names_are_all_there() -> None:
    import acclimate

    for name in acclimate.__all__:
        assert getattr(acclimate, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        acclimate.tunes  # noqa: B018


# --- tune ---


def test_tune_prints_a_table_and_where_things_are(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    code, out, err = called(capsys, "tune", *arguments, "-o", str(tmp_path / "run[1]"))
    assert code == 0
    assert "Traceback" not in err
    for text in (
        "accuracy",
        "nll",
        "before",
        "after",
        "lora on train.jsonl",
        "trained 12,288 of 92,400 parameters in 24 steps",
    ):
        assert text in out
    # whole, although longer than a line and with brackets that Rich would take for markup
    assert f"report   {tmp_path / 'run[1]' / 'report.html'}" in out.splitlines()
    assert f"try it   acclimate predict {tmp_path / 'run[1]'} --input FILE" in out.splitlines()
    assert "training" in err
    assert "scoring the tuned model" in err


def test_tune_json_is_one_document(capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path) -> None:
    code, out, err = called(capsys, "tune", *arguments, "-o", str(tmp_path / "run"), "--json", "--seed", "5")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["run"] == str(tmp_path / "run")
    assert document["info"]["seed"] == 5
    assert document["info"] == json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["evaluation"] == json.loads((tmp_path / "run" / "evaluation.json").read_text())


def test_tune_quiet_prints_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path) -> None:
    assert called(capsys, "tune", *arguments, "-o", str(tmp_path / "run"), "--quiet") == (0, "", "")


@pytest.mark.parametrize("task", ["sft", "dpo", "classify"])
def test_every_task_keeps_stderr_clean_for_machines(
    capsys: pytest.CaptureFixture[str], tiny_lm: Path, tmp_path: Path, task: str
) -> None:
    rows = [{**row, "prompt": row["text"], "completion": " a", "chosen": " a", "rejected": " b"} for row in TEST]
    data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    options = ["--model", str(tiny_lm), "--data", data, "--eval-data", data, "--task", task, "--adapter", "full"]
    code, out, err = called(
        capsys, "tune", *options, "--set", "train.max_steps=1", "-o", str(tmp_path / "run"), "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["info"]["status"] == "done"


def test_flags_win_over_the_recipe_and_set_over_both(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 1\nadapter: dora\nadapter_args: {r: 2}\ntrain: {max_steps: 1, lr: 0.5}\n")
    options = ["--seed", "2", "--adapter", "rslora", "--set", "seed=3", "--set", "adapter_args.lora_alpha=4"]
    code, out, _ = called(capsys, "tune", str(recipe), *arguments, *options, "-o", str(tmp_path / "run"), "--json")
    assert code == 0
    info = json.loads(out)["info"]
    assert (info["seed"], info["method"]["adapter"], info["steps"]) == (3, "rslora", 1)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)


def test_resume_and_overwrite(capsys: pytest.CaptureFixture[str], run: Path, arguments: list[str]) -> None:
    code, out, _ = called(capsys, "tune", "--resume", str(run), "--json")
    assert code == 0
    assert json.loads(out)["info"]["status"] == "done"
    code, _, err = called(capsys, "tune", *arguments, "-o", str(run))
    assert code == 2
    assert "already holds a run (done)" in err
    for extra in (["--seed", "1"], ["--overwrite"], ["-o", "x"], ["--set", "seed=1"]):
        code, _, err = called(capsys, "tune", "--resume", str(run), *extra)
        assert code == 2
        assert "--resume goes on with the run's own recipe" in err


# --- evaluate ---


def test_evaluate_prints_and_writes_its_directory(capsys: pytest.CaptureFixture[str], run: Path, in_tmp: Path) -> None:
    code, out, _ = called(capsys, "evaluate", str(run))
    assert code == 0
    assert "30 rows" in out
    assert "accuracy" in out
    assert "Brier" in out  # the definition of what is in the table
    assert {item.name for item in (in_tmp / "runs" / "evaluation-colours").iterdir()} == {
        "evaluation.json",
        "predictions.jsonl",
        "report.html",
    }
    code, out, err = called(capsys, "evaluate", str(run), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["directory"] == "runs/evaluation-colours-2"
    own = json.loads((run / "evaluation_after.json").read_text())
    assert document["metrics"] == own["metrics"]
    assert called(capsys, "evaluate", str(run), "--quiet") == (0, "", "")


def test_evaluate_a_model_and_its_adapter(
    capsys: pytest.CaptureFixture[str], run: Path, arguments: list[str], tmp_path: Path
) -> None:
    model, data = arguments[1], arguments[5]
    common = ["--data", data, "--task", "choice", "--json"]
    scores = []
    for name, extra in (("base", []), ("tuned", ["--adapter", str(run / "adapter")])):
        code, out, _ = called(capsys, "evaluate", model, *common, *extra, "-o", str(tmp_path / name))
        assert code == 0
        scores.append(json.loads(out)["metrics"])
    assert scores[0] == json.loads((run / "evaluation_before.json").read_text())["metrics"]
    assert scores[1] == json.loads((run / "evaluation_after.json").read_text())["metrics"]


def test_evaluate_takes_the_users_columns(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": row["text"], "colour": row["label"]} for row in TEST])
    command = ["evaluate", str(run), "--data", str(data), "-o", str(tmp_path / "x"), "--json"]
    code, _, err = called(capsys, *command)
    assert code == 2
    assert "has no column 'label' (needed by task 'choice'). Columns found: text, colour, id" in err
    code, out, _ = called(capsys, *command, "--set", "columns.label=colour")
    assert code == 0
    assert json.loads(out)["metrics"] == json.loads((run / "evaluation_after.json").read_text())["metrics"]


# --- predict ---


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "ndjson": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "json": json.dumps,
    "csv": as_csv,
    "txt": lambda rows: "\n\n".join(row["text"] for row in rows),
    "log": lambda rows: "\r\n".join(row["text"] for row in rows),
}


def expected_answers(run: Path) -> list[str]:
    return [json.loads(line)["prediction"] for line in (run / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ending", WRITERS)
def test_predict_reads_files_of_every_kind(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(WRITERS[ending]([{"text": row["text"]} for row in TEST]).encode())
    code, out, _ = called(capsys, "predict", str(run), "--input", str(path))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["text"] for row in rows] == [row["text"] for row in TEST]
    assert [row["prediction"] for row in rows] == expected_answers(run)
    assert all(set(row["probs"]) == set(WORDS) for row in rows)


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_predict_reads_standard_input(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [row["text"] for row in TEST[:3]] + [
        "",
        json.dumps({"text": TEST[3]["text"], "mine": 1}),
        "{ an open brace",
    ]
    stdin(monkeypatch, "\n".join(lines).encode())
    code, out, _ = called(capsys, "predict", str(run))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prediction"] for row in rows[:4]] == expected_answers(run)[:4]
    assert (rows[3]["mine"], rows[4]["text"]) == (1, "{ an open brace")
    assert len(rows) == 5


def test_predict_json_is_one_document(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, f"{TEST[0]['text']}\n{TEST[1]['text']}".encode())
    code, out, err = called(capsys, "predict", str(run), "--json")
    assert (code, err) == (0, "")
    assert [row["prediction"] for row in json.loads(out)] == expected_answers(run)[:2]


def test_predict_completes_lines(
    capsys: pytest.CaptureFixture[str], sft_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, "\n".join(row["text"] for row in TEST[:6]).encode())
    code, out, _ = called(capsys, "predict", str(sft_run))
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["completion"] for row in rows] == [row["label"] for row in TEST[:6]]


def test_predict_in_a_pipe_that_closes(run: Path) -> None:
    command = f"yes 'the sky' | {sys.executable} -m acclimate predict {run} | head -n 2; echo ${{PIPESTATUS[1]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    *rows, code = result.stdout.splitlines()
    assert [json.loads(line)["text"] for line in rows] == ["the sky"] * 2
    assert code == "0"
    assert "Traceback" not in result.stderr
    assert "bug" not in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.txt", b"caf\xe9\n", "is not UTF-8: byte 0xe9 in line 1"),
        ("rows.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
        ("rows.csv", b"", "no rows in"),
        ("rows.jsonl", b'{"body": "a"}\n', "has no column 'text'"),
    ],
)
def test_predict_bad_input(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, out, err = called(capsys, "predict", str(run), "-i", str(path))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_predict_bad_standard_input_and_missing_things(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, b"the sky\ncaf\xe9\n")
    code, _, err = called(capsys, "predict", str(run))
    assert code == 2
    assert "line 2 of standard input is not UTF-8" in err
    code, _, err = called(capsys, "predict", str(run), "-i", str(tmp_path / "none.txt"))
    assert code == 2
    assert "no file" in err
    code, _, err = called(capsys, "predict", str(tmp_path))
    assert code == 2
    assert "no run at" in err


# --- chat, export, methods, models, doctor ---


def test_chat_answers_lines_with_probabilities(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter([TEST[0]["text"], "/new", TEST[1]["text"], ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, _ = called(capsys, "chat", str(run))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == expected_answers(run)[:2]
    for line in out.splitlines():
        values = [float(value) for value in line.split()[1::2]]
        assert values == sorted(values, reverse=True)
        assert sum(values) == pytest.approx(1, abs=2e-3)


def test_chat_streams_a_reply(
    capsys: pytest.CaptureFixture[str], sft_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eof(prompt: str) -> str:
        if said:
            raise EOFError
        said.append(prompt)
        return "the sky"

    said: list[str] = []
    monkeypatch.setattr("builtins.input", eof)
    monkeypatch.setattr("acclimate.generate.stream_reply.__kwdefaults__", {"max_new_tokens": 8})
    code, out, err = called(capsys, "chat", str(sft_run))
    assert code == 0
    assert out.strip()
    assert "Traceback" not in err


def test_export(capsys: pytest.CaptureFixture[str], run: Path, in_tmp: Path) -> None:
    code, out, _ = called(capsys, "export", str(run), "--to", "peft", "--json")
    assert code == 0
    assert json.loads(out) == {"directory": "colours-peft", "format": "peft"}
    weights = "adapter_model.safetensors"
    assert (in_tmp / "colours-peft" / weights).read_bytes() == (run / "adapter" / weights).read_bytes()
    code, out, _ = called(capsys, "export", str(run), "--to", "merged", "-o", "my [model]")
    assert code == 0
    assert out == "wrote my [model]\n"
    assert (in_tmp / "my [model]" / "model.safetensors").exists()
    code, _, err = called(capsys, "export", str(run), "--to", "gguf")
    assert code == 2
    assert "--to is peft, merged or lora, not 'gguf'" in err


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    from acclimate.methods import all_methods

    code, out, err = called(capsys, "methods", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == [method.name for method in all_methods()]
    assert sum(bool(row["paper"]) for row in rows) == 38
    code, out, _ = called(capsys, "methods", "--stage", "optimizer", "--json")
    assert {row["stage"] for row in json.loads(out)} == {"optimizer"}
    code, out, _ = called(capsys, "methods", "--stage", "adapter")
    assert code == 0
    assert "lora" in out
    code, _, err = called(capsys, "methods", "--stage", "adaptr")
    assert code == 2
    assert "no stage 'adaptr'. Did you mean 'adapter'?" in err


def test_models_list_and_add(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path))
    code, out, err = called(capsys, "models", "list", "--json")
    assert (code, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) == {"smollm2", "minilm"}
    assert rows["smollm2"]["ready"] is False
    assert rows["smollm2"]["path"] == str(tmp_path / "models" / "smollm2-0.1.2")
    (tmp_path / "models" / "smollm2-0.1.2").mkdir(parents=True)
    (tmp_path / "models" / "smollm2-0.1.2" / "model.safetensors").touch()
    code, out, _ = called(capsys, "models", "list")
    assert code == 0
    ready = {cells[1].strip(): cells[4].strip() for line in out.splitlines() if len(cells := line.split("│")) > 4}
    assert ready["smollm2"] == "yes"
    assert ready["minilm"].startswith("acclimate")  # the command that adds it, folded into its column
    code, out, _ = called(capsys, "models", "add", "smollm2")  # it is there: nothing to do
    assert (code, out) == (0, f"smollm2 is ready in {tmp_path / 'models' / 'smollm2-0.1.2'}\n")
    code, _, err = called(capsys, "models", "add", "smollm3")
    assert code == 2
    assert "Did you mean 'smollm2'?" in err


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version

    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "not" / "there"))
    code, out, err = called(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["versions"]["peft"] == version("peft")
    assert facts["models"] == {"smollm2": False, "minilm": False}
    assert facts["disk_free_bytes"] > 0
    assert set(facts["extras"]) >= {"dev", "docs", "bench"}
    assert facts["extras"]["dev"] is True  # or this test would not run
    code, out, _ = called(capsys, "doctor")
    assert code == 0
    assert "acclimate models add smollm2" in " ".join(out.replace("│", " ").split())
    assert called(capsys, "doctor", "--quiet") == (0, "", "")


# --- numbers ---


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (52_640, "53 kB"), (538e6, "538 MB"), (2.5e9, "2.5 GB")],
)
def test_bytes(count: float | None, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (59.2, "59.2 s"), (59.7, "1 m 00 s"), (61, "1 m 01 s"), (3_661, "1 h 01 m")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_metrics() -> None:
    assert metric_text({"value": 0.72, "low": 0.6806, "high": 0.758}) == "0.720 (0.681 to 0.758)"
    assert metric_text({"value": 0.1234, "low": None, "high": None}) == "0.123"
