"""`acclimate quantize`: output, files, exit codes, a kill in the middle, and what the other verbs do with the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from acclimate import evaluate, tune
from acclimate.cli.common import run_app
from acclimate.compress import QuantLinear, load_quantized
from acclimate.compress.files import texts
from acclimate.compress.quantize_files import quantize_model
from acclimate.compress.text import perplexity, windows
from acclimate.errors import InputError
from acclimate.models import load_model
from acclimate.runs import PARTIAL
from acclimate.use import export
from compress.small import blocks_worked_on, killed_after_first_block
from conftest import colour_rows, write_jsonl

SMALL = ["--seqlen", "32", "--sequences", "6", "--group-size", "16", "--rank", "4", "--calibration", "notes.txt"]
OPTIONS: dict[str, Any] = {"group_size": 16, "rank": 4, "calibration": "notes.txt", "sequences": 6, "seqlen": 32}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text that the tiny tokenizer was trained on."""
    (tmp_path / "notes.txt").write_text("\n".join(row["text"] for row in colour_rows(200)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_model_to_a_folder_and_on(here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["quantize", str(tiny_lm), "--bits", "3", *SMALL, "-o", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    kept = json.loads((here / "out" / "quantization.json").read_text())
    assert kept == {key: value for key, value in document.items() if key != "directory"}
    assert {p.name for p in here.iterdir()} == {"notes.txt", "out"}
    assert not any(p.name.startswith((".", "block", "before", "journal")) for p in (here / "out").iterdir())
    assert not (here / "out" / "model").exists()
    # three perplexities on the last tenth of the text, which calibration did not see
    base, tokenizer = load_model("out")
    assert isinstance(base.model.layers[0].mlp.up_proj, QuantLinear)
    held = windows(tokenizer, texts("notes.txt", None)[1], 6, 32)
    assert document["perplexity_before"] == pytest.approx(perplexity(load_model(str(tiny_lm))[0], held), rel=1e-5)
    assert document["perplexity_quantised"] == pytest.approx(perplexity(base, held), rel=1e-5)
    model = PeftModel.from_pretrained(base, "out/adapter")
    assert document["perplexity_after"] == pytest.approx(perplexity(model, held), rel=1e-5)
    assert document["bytes_after"] == sum(file.stat().st_size for file in (here / "out").rglob("*.safetensors"))
    page = (here / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "J over GPTQ" in page
    assert "import acclimate.compress" in (here / "out" / "README.md").read_text()
    # evaluate scores the base with its adapter; training starts there and goes on
    rows = write_jsonl(here / "rows.jsonl", colour_rows(24))
    scored = evaluate("out", str(rows), task="choice")
    with_adapter = evaluate("out", str(rows), task="choice", adapter="out/adapter")
    assert scored.metrics["nll"] == with_adapter.metrics["nll"]
    run = tune(
        model="out",
        data=str(rows),
        eval_data=str(rows),
        task="choice",
        directory="run",
        train={"max_steps": 2, "lr": 0.01},
    )
    found = json.loads((run / "evaluation.json").read_text())
    assert found["before"]["metrics"]["nll"]["value"] == pytest.approx(scored["nll"], rel=1e-4)
    assert found["after"]["metrics"]["nll"]["value"] != pytest.approx(scored["nll"], rel=1e-4)
    assert evaluate("run", str(rows))["nll"] == pytest.approx(found["after"]["metrics"]["nll"]["value"], rel=1e-4)
    started, ended = (
        PeftModel.from_pretrained(load_model("out")[0], where) for where in ("out/adapter", "run/adapter")
    )
    for (name, before), after in zip(started.named_parameters(), ended.parameters(), strict=True):
        if "lora_" in name:  # two steps from there: it began there, and not at zero
            assert float((before - after).abs().max()) < 0.1
            assert not torch.equal(before, after)
    export("run", "merged", "whole")
    ids = torch.arange(2, 30)[None]
    whole = load_model("whole")[0]
    assert not any(isinstance(part, QuantLinear) for part in whole.modules())
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, ended.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    for settings, message in (
        ({"adapter": "dora"}, "has an adapter of its own"),
        ({"adapter_args": {"r": 2}}, "has an adapter of its own"),
        ({"task": "classify"}, "Take task choice"),
    ):
        with pytest.raises(InputError, match=message):
            tune(**{"model": "out", "data": str(rows), "task": "choice", "directory": "other", **settings})  # type: ignore[arg-type]


def test_tables_other_formats_and_a_plan(here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["quantize", str(tiny_lm), "--bits", "4", *SMALL, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {p.name for p in here.iterdir()} == {"notes.txt"}
    assert run_app(["quantize", str(tiny_lm), "--bits", "4", *SMALL, "-o", "ct", "--format", "compressed-tensors"]) == 0
    shown = capsys.readouterr().out
    for text in ("perplexity", "bits a weight", "of GPTQ's on average", "wrote ct"):
        assert text in shown
    done = json.loads((here / "ct" / "quantization.json").read_text())
    assert [row["name"] for row in plan["layers"]] == [row["name"] for row in done["layers"]]
    assert plan["bits_per_weight"]["total"] == pytest.approx(done["bits_per_weight"]["total"], rel=0.02)
    assert plan["bytes_after"] == pytest.approx(done["bytes_after"], rel=0.1)
    assert (
        run_app(["quantize", str(tiny_lm), "--bits", "4", *SMALL, "-o", "dense", "--format", "dense", "--quiet"]) == 0
    )
    assert capsys.readouterr().out == ""
    ids = torch.arange(2, 40)[None]
    one, other = load_quantized("ct"), load_quantized("dense")
    with torch.no_grad():
        torch.testing.assert_close(one(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "5", "-o", "out"], "bits is one of 2, 3, 4, 8, not 5"),
        (["--group-size", "7", "-o", "out"], "group_size 7 does not divide"),
        (["--rank", "-1", "-o", "out"], "rank is at least 0"),
        (["--rank", "9999", "--group-size", "16", "-o", "out"], "take a lower one"),
        (["--kappa", "2", "--group-size", "16", "--rank", "4", "-o", "out"], "kappa is between 0 and 1"),
        (
            ["--bits", "3", "--format", "compressed-tensors", "-o", "out"],
            "compressed-tensors holds weights of 4 or 8 bits",
        ),
        (["--format", "x", "-o", "out"], "format is one of"),
        (["--bits", "3"], "say where to write the quantised model"),
        (["-o", "notes.txt"], "'notes.txt' exists"),
        (["-o", "out", "--sequences", "0"], "--sequences is at least 1"),
        (["--bits", "5", "--dry-run"], "bits is one of"),
    ],
)
def test_wrong_input_is_one_message(
    arguments: list[str], message: str, here: Path, tiny_lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["quantize", str(tiny_lm), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {p.name for p in here.iterdir()} == {"notes.txt"}


def test_a_killed_run_goes_on_and_ends_with_the_same_weights(
    here: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after_first_block(lambda: quantize_model(str(tiny_lm), "out", **OPTIONS), monkeypatch)
    assert not (here / "out").exists()
    assert (here / f"{PARTIAL}out" / "blocks" / "block-0000.safetensors").exists()
    done = blocks_worked_on(monkeypatch)
    quantize_model(str(tiny_lm), "out", **OPTIONS)
    assert done == [1]
    quantize_model(str(tiny_lm), "again", **OPTIONS)
    one, other = (load_quantized(name).state_dict() for name in ("out", "again"))
    assert all(torch.equal(one[key], other[key]) for key in other)
    assert not (here / f"{PARTIAL}out").exists()
