"""`acclimate merge --evaluate` and `acclimate soup --evaluate`: the scores are those of `acclimate evaluate`, for the right models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from acclimate import evaluate, tune
from acclimate.cli.common import run_app
from acclimate.merge import monosoup_checkpoint
from acclimate.merge.adapter_files import open_adapter
from acclimate.merge.baselines import peft_linear
from acclimate.models import load_model
from acclimate.report import render
from conftest import colour_rows, write_jsonl
from merge.synthetic import deltas, deltas_of, distance

TRAIN = {"max_steps": 12, "lr": 2e-2, "batch_size": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_lm: Path) -> Path:
    """Two runs of LoRA and one that trained all weights, plain copies of the adapters, and rows."""
    where = tmp_path_factory.mktemp("evaluate")
    rows = {name: write_jsonl(where / f"{name}.jsonl", colour_rows(24, seed)) for name, seed in (("a", 1), ("b", 2))}
    train = write_jsonl(where / "train.jsonl", colour_rows(48))
    for name, adapter, seed in (("run-a", "lora", 0), ("run-b", "lora", 1), ("run-full", "full", 0)):
        tune(
            model=str(tiny_lm),
            data=str(train),
            eval_data=str(rows["b" if name == "run-b" else "a"]),
            task="choice",
            adapter=adapter,
            seed=seed,
            train={**TRAIN, "lr": 2e-3} if adapter == "full" else TRAIN,
            directory=where / name,
        )
    return where


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_merged_runs_next_to_inputs_and_other_rules(
    capsys: pytest.CaptureFixture[str], place: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, out, err = called(
        capsys,
        "merge",
        "run-a",
        "run-b",
        "-o",
        "ab",
        "--rule",
        "sum",
        "--evaluate",
        "own",
        "--evaluate",
        "own",
        "--json",
    )
    assert (code, err) == (0, "")
    document = json.loads(out)["scores"]
    assert document == json.loads(Path("ab/scores.json").read_text())
    systems = {system["name"]: system for system in document["systems"]}
    assert list(systems) == [
        "base", "own adapter", "merged (sum)", "mean", "ties", "dare", "tsv", "linear (PEFT)",
    ]  # fmt: skip
    # by `acclimate evaluate`, one by one
    own = {name: evaluate(name)["accuracy"] for name in ("run-a", "run-b")}
    assert {part: entry["value"] for part, entry in systems["own adapter"]["scores"].items()} == own
    assert systems["own adapter"]["mean_kept"] == 1
    labels = {word: word for word in ("blue", "green", "red")}
    kept = []
    for name, rows in (("run-a", "a.jsonl"), ("run-b", "b.jsonl")):
        settings: dict[str, Any] = {"task": "choice", "labels": labels}
        assert systems["base"]["scores"][name]["value"] == evaluate(tiny_lm, rows, **settings)["accuracy"]
        merged = evaluate(tiny_lm, rows, adapter="ab", **settings)["accuracy"]
        assert systems["merged (sum)"]["scores"][name]["value"] == merged
        kept.append(merged / own[name])
    assert systems["merged (sum)"]["mean_kept"] == pytest.approx(sum(kept) / 2)
    assert [(pair["b"], pair["rows"]) for pair in document["differences"]] == [
        (other, name) for other in ("own adapter", "base") for name in own
    ]
    gap = document["differences"][0]["value"]
    assert gap == pytest.approx(systems["merged (sum)"]["scores"]["run-a"]["value"] - own["run-a"])
    page = render(place / "ab")
    assert document["conclusion"][0] in page.replace("&#39;", "'")
    assert "linear (PEFT)" in page


def test_plain_adapters_with_named_rows(
    capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, out, _ = called(
        capsys, "merge", "run-a/adapter", "run-b/adapter", "-o", "plain", "--evaluate", "first=a.jsonl", "--evaluate", "b.jsonl",
        "--task", "choice", "--set", "max_eval_samples=9",
    )  # fmt: skip
    assert code == 0
    assert "first: accuracy" in out
    assert "On average 'merged (tsv)' keeps" in out
    assert "On b: " in out
    document = json.loads(Path("plain/scores.json").read_text())
    assert [(part["name"], part["n"], part["metric"]) for part in document["rows"]] == [
        ("first", 9, "accuracy"),
        ("b", 9, "accuracy"),
    ]
    assert "tsv" not in {system["name"] for system in document["systems"]}  # it is the merged one
    # a second merge of what was merged takes no scores along
    assert called(capsys, "soup", "plain", "-o", "plain-soup", "-q")[0] == 0
    assert not Path("plain-soup/scores.json").exists()


def test_soup_of_a_checkpoint(
    capsys: pytest.CaptureFixture[str], place: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, out, _ = called(
        capsys, "soup", str(tiny_lm), "run-full", "-o", "robust", "--evaluate", "own", "--evaluate", "b.jsonl", "--json"
    )
    assert code == 0
    document = json.loads(out)["scores"]
    systems = {system["name"]: system for system in document["systems"]}
    assert list(systems) == ["base", "tuned", "soup", "WiSE-FT 0.3", "WiSE-FT 0.5", "WiSE-FT 0.7", "LiNeS"]
    assert systems["tuned"]["scores"]["run-full"]["value"] == evaluate("run-full")["accuracy"]
    assert systems["tuned"]["scores"]["b"]["value"] == evaluate("run-full", "b.jsonl")["accuracy"]
    monosoup_checkpoint(tiny_lm, "run-full", "again")
    labels = {word: word for word in ("blue", "green", "red")}
    again = evaluate("again", "b.jsonl", task="choice", labels=labels)
    assert systems["soup"]["scores"]["b"]["value"] == again["accuracy"]
    assert "LiNeS" in render(place / "robust")


def test_soup_of_an_adapter(
    capsys: pytest.CaptureFixture[str], place: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, out, _ = called(
        capsys, "soup", "run-a", "-o", "robust-a", "--evaluate", "own", "--evaluate", "b.jsonl", "--json"
    )
    assert code == 0
    systems = {system["name"]: system for system in json.loads(out)["scores"]["systems"]}
    assert list(systems) == ["base", "tuned", "soup", "WiSE-FT 0.3", "WiSE-FT 0.5", "WiSE-FT 0.7"]
    assert systems["tuned"]["scores"]["run-a"]["value"] == evaluate("run-a")["accuracy"]
    # half-way between base and tuned, by PEFT's own scale
    model, _ = load_model(str(tiny_lm))
    half = PeftModel.from_pretrained(model, "run-a/adapter")
    for module in half.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    half.merge_and_unload().save_pretrained("half")
    load_model(str(tiny_lm))[1].save_pretrained("half")
    labels = {word: word for word in ("blue", "green", "red")}
    expected = evaluate("half", "b.jsonl", task="choice", labels=labels)["accuracy"]
    assert systems["WiSE-FT 0.5"]["scores"]["b"]["value"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "run-a", "run-b", "--evaluate", "own"), "there are 2 adapters and 1 sets of rows"),
        (("merge", "run-a/adapter", "run-b", "--evaluate", "own", "--evaluate", "own"), "'run-a/adapter' is no run of"),
        (("merge", "run-a", "run-b", "--evaluate", "x=", "--evaluate", "own"), "--evaluate takes DATA or NAME=DATA"),
        (("merge", "run-a", "run-b", "--evaluate", "a.jsonl", "--evaluate", "a.jsonl"), "two sets of rows are called 'a'"),
        (("merge", "run-a", "run-b", "--evaluate", "own", "--evaluate", "c.jsonl"), "no data file at 'c.jsonl'"),
        (("merge", "run-a/adapter", "run-b", "--evaluate", "a.jsonl", "--evaluate", "own"), "say what to learn from"),
        (("soup", "run-full", "run-full/model/model.safetensors", "--evaluate", "own"), "has no config.json beside it"),
    ],
)  # fmt: skip
def test_wrong_rows_are_told_of_before_the_work(
    capsys: pytest.CaptureFixture[str],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    code, out, err = called(capsys, *arguments, "-o", "nothing")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path("nothing").exists()


def test_an_adapter_that_names_no_model(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    source = open_adapter("run-a")
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (nameless / "adapter_config.json").write_text(json.dumps({**source.config, "base_model_name_or_path": None}))
    (nameless / "adapter_model.safetensors").write_bytes(Path("run-a/adapter/adapter_model.safetensors").read_bytes())
    rows = ("--evaluate", "a.jsonl", "--task", "choice", "-q")
    code, _, err = called(capsys, "merge", str(nameless), "-o", str(tmp_path / "x"), *rows)
    assert code == 2
    assert "does not say which model it belongs to. Name it with --model" in err
    code, _, err = called(capsys, "merge", str(nameless), "-o", str(tmp_path / "x"), *rows, "--model", str(tiny_lm))
    assert (code, err) == (0, "")
    assert (tmp_path / "x" / "report.html").exists()


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.5, -0.5]], ids=["equal", "negative"])
def test_peft_linear_is_pefts(tiny_lm: Path, tmp_path: Path, weights: list[float]) -> None:
    for name in ("x", "y"):
        torch.manual_seed(ord(name))
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(load_model(str(tiny_lm))[0], config).save_pretrained(tmp_path / name)
    model = PeftModel.from_pretrained(load_model(str(tiny_lm))[0], tmp_path / "x", adapter_name="x")
    model.load_adapter(tmp_path / "y", "y")
    model.add_weighted_adapter(["x", "y"], weights if sum(weights) == 1 else [0.5, 0.5], "both", "linear")
    model.save_pretrained(tmp_path / "peft", selected_adapters=["both"])
    config, state = peft_linear([open_adapter(tmp_path / name) for name in ("x", "y")], weights)
    assert distance(deltas_of(config, state), deltas(tmp_path / "peft" / "both")) < 1e-6
    assert load_file(tmp_path / "peft" / "both" / "adapter_model.safetensors").keys() == state.keys()


def test_peft_linear_needs_one_rank(tiny_lm: Path, tmp_path: Path) -> None:
    for name, rank in (("x", 4), ("y", 2)):
        config = LoraConfig(r=rank, target_modules=["q_proj"])
        get_peft_model(load_model(str(tiny_lm))[0], config).save_pretrained(tmp_path / name)
    adapters = [open_adapter(tmp_path / name) for name in ("x", "y")]
    with pytest.raises(ValueError, match="adapters of one rank on the same layers"):
        peft_linear(adapters)
    with pytest.raises(ValueError, match="the weights add up to 0"):
        peft_linear(adapters[:1], [0.0])
