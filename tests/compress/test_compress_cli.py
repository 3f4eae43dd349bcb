"""`acclimate compress`: output, files, exit codes, and a kill in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from acclimate import evaluate
from acclimate.cli.common import run_app
from acclimate.compress import LowRankLinear, blocks
from acclimate.compress.files import compress_model, texts
from acclimate.compress.text import perplexity, windows
from acclimate.data import read_text
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.runs import PARTIAL
from compress.small import blocks_worked_on, killed_after_first_block
from conftest import colour_rows, write_jsonl

SMALL = ["--seqlen", "32", "--sequences", "6", "--ratio", "0.3", "--calibration", "notes.txt"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text that the tiny tokenizer was trained on."""
    (tmp_path / "notes.txt").write_text("\n".join(row["text"] for row in colour_rows(200)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents(captured: str) -> Any:
    return json.loads(captured)


def test_from_a_model_to_a_folder_that_everything_loads(
    here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["compress", str(tiny_lm), *SMALL, "-o", "out", "--json"]) == 0
    document = documents(capsys.readouterr().out)
    kept = json.loads((here / "out" / "compression.json").read_text())
    assert kept == {key: value for key, value in document.items() if key != "directory"}
    assert {p.name for p in here.iterdir()} == {"notes.txt", "out"}
    assert not any(p.name.startswith((".", "block", "before", "journal")) for p in (here / "out").iterdir())
    model, tokenizer = load_model("out")
    assert isinstance(model.model.layers[0].mlp.up_proj, LowRankLinear)
    assert document["bytes_after"] == (here / "out" / "model.safetensors").stat().st_size
    assert document["bytes_before"] == pytest.approx((tiny_lm / "model.safetensors").stat().st_size, rel=0.05)
    assert document["parameters_after"] == sum(p.numel() for p in model.parameters())
    share = document["layer_parameters_after"] / document["layer_parameters_before"]
    assert 0.6 < share <= 0.7
    # both perplexities are on the last tenth of the text, which calibration did not see
    _, held = texts("notes.txt", None)
    ids = windows(tokenizer, held, 6, 32)
    assert document["eval_tokens"] == ids.numel()
    assert document["perplexity_after"] == pytest.approx(perplexity(model, ids), rel=1e-5)
    assert document["perplexity_before"] == pytest.approx(perplexity(load_model(str(tiny_lm))[0], ids), rel=1e-5)
    page = (here / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "Perplexity before" in page
    assert "acclimate.compress" in (here / "out" / "README.md").read_text()
    # the other verbs take it as they take any model
    rows = write_jsonl(here / "rows.jsonl", colour_rows(12))
    assert len(evaluate("out", str(rows), task="choice").predictions) == 12


def test_tables_and_a_dense_folder(here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["compress", str(tiny_lm), *SMALL, "-o", "out", "--dense", "--allocation", "energy"]) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "weights on disk" in shown
    assert "gate_proj" in shown
    assert "wrote out" in shown
    model, _ = load_model("out")
    assert not any(isinstance(part, LowRankLinear) for part in model.modules())
    assert run_app(["compress", str(tiny_lm), *SMALL, "-o", "low", "--allocation", "energy", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, load_model("low")[0](ids).logits, rtol=1e-5, atol=1e-5)


def test_dry_run_says_ranks_and_sizes_and_writes_nothing(
    here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["compress", str(tiny_lm), "--ratio", "0.3", "--dry-run", "--json", "--exclude", "o_proj"]) == 0
    plan = documents(capsys.readouterr().out)
    assert len(plan["layers"]) == 12
    assert {p.name for p in here.iterdir()} == {"notes.txt"}
    assert run_app(["compress", str(tiny_lm), *SMALL, "-o", "out", "--json", "--exclude", "o_proj"]) == 0
    done = documents(capsys.readouterr().out)
    assert [(row["name"], row["rank"]) for row in done["layers"]] == [
        (row["name"], row["rank"]) for row in plan["layers"]
    ]
    assert done["parameters_after"] == plan["parameters_after"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1.5", "-o", "out"], "between 0 and 1, not 1.5"),
        (["--ratio", "0.2"], "say where to write the compressed model"),
        (["-o", "notes.txt", "--calibration", "notes.txt"], "'notes.txt' exists"),
        (["-o", "out", "--calibration", "nothing.txt"], "no data file at 'nothing.txt'"),
        (["-o", "out", "--calibration", "empty.txt"], "there is no text in 'empty.txt'"),
        (["-o", "out", "--calibration", "rows.jsonl"], "has no column 'text'"),
        (["-o", "out", "--calibration", "notes.txt", "--seqlen", "99999"], "less than one window of 99999"),
        (["-o", "out", "--sequences", "0"], "--sequences is at least 1"),
        (["-o", "out", "--beta", "x"], "--beta is a number from 0 to 1, or auto, not 'x'"),
        (["-o", "out", "--calibration", "notes.txt", "--seqlen", "16", "--refresh", "x"], "refresh is one of"),
        (["-o", "out", "--calibration", "notes.txt", "--seqlen", "16", "--target", "x"], "leave no layer"),
    ],
)
def test_wrong_input_is_one_message(
    arguments: list[str], message: str, here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.txt").write_text(" \n")
    write_jsonl(here / "rows.jsonl", [{"question": "why"}])
    assert run_app(["compress", str(tiny_lm), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {p.name for p in here.iterdir()} == {"notes.txt", "empty.txt", "rows.jsonl"}


def test_the_input_is_not_overwritten(here: Path, tiny_lm: Path) -> None:
    with pytest.raises(InputError, match="is, or holds, the input"):
        compress_model(str(tiny_lm), tiny_lm, overwrite=True)


def test_a_killed_run_goes_on_and_ends_with_the_same_weights(
    here: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"ratio": 0.3, "calibration": "notes.txt", "sequences": 6, "seqlen": 32}
    killed_after_first_block(lambda: compress_model(str(tiny_lm), "out", **options), monkeypatch)
    assert not (here / "out").exists()
    assert (here / f"{PARTIAL}out" / "blocks" / "block-0000.safetensors").exists()
    done = blocks_worked_on(monkeypatch)
    compress_model(str(tiny_lm), "out", **options)
    assert done == [1]
    compress_model(str(tiny_lm), "again", **options)
    one, other = (load_model(name)[0].state_dict() for name in ("out", "again"))
    assert all(torch.equal(one[key], other[key]) for key in other)
    assert not (here / f"{PARTIAL}out").exists()


def test_other_settings_throw_unfinished_work_away(here: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"calibration": "notes.txt", "sequences": 6, "seqlen": 32}
    save = blocks._Work._save

    def interrupted(self: Any, *rest: Any) -> None:
        save(self, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blocks._Work, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compress_model(str(tiny_lm), "out", ratio=0.3, **options)
    assert (here / f"{PARTIAL}out" / "blocks" / "block-0000.safetensors").exists()
    document = compress_model(str(tiny_lm), "out", ratio=0.5, **options)
    assert 0.4 < document["layer_parameters_after"] / document["layer_parameters_before"] <= 0.5


def test_text_of_files_rows_and_samples(here: Path) -> None:
    write_jsonl(here / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    assert read_text("rows.jsonl") == "one\n\ntwo"
    assert read_text("notes.txt") == (here / "notes.txt").read_text()
    assert read_text("wikitext2", split="test") == read_text("wikitext2:test")
    assert " = Robert <unk> = " in read_text("wikitext2:test")
    for calibration, evaluation in (("notes.txt", None), (None, None), (None, "notes.txt")):
        one, other = texts(calibration, evaluation)
        assert one[:1000] not in other
        assert other[:1000] not in one
    one, other = texts("notes.txt", None)
    assert one + other == read_text("notes.txt")
