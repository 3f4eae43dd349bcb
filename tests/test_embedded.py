"""Every job once with the real embedded models (fetched by `make test`): small settings, real numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from acclimate import data, evaluate, export, load_run, models, predict, tune
from acclimate.runs import Run
from conftest import write_jsonl

pytestmark = pytest.mark.embedded


def metric(run: Run, when: str, name: str) -> float:
    return json.loads((run / "evaluation.json").read_text())[when]["metrics"][name]["value"]


@pytest.fixture(scope="module")
def choice_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    train = {"max_steps": 14, "batch_size": 16, "save_every": 14}
    return tune(directory=tmp_path_factory.mktemp("embedded") / "run", max_eval_samples=60, train=train)


def test_choice_learns_the_bundled_task(choice_run: Run) -> None:
    assert metric(choice_run, "before", "nll") == pytest.approx(2.5, abs=0.4)  # measured on 500 rows: 2.50
    assert metric(choice_run, "after", "nll") < metric(choice_run, "before", "nll") - 0.5
    assert metric(choice_run, "after", "accuracy") > metric(choice_run, "before", "accuracy") + 0.1
    info = choice_run.info
    assert info["parameters"] == {"total": 136_957_248, "trainable": 2_442_240}
    assert info["adapter_bytes"] == pytest.approx(2_442_240 * 4, rel=0.01)


def test_evaluate_and_predict_agree_with_the_run(choice_run: Run) -> None:
    evaluation = evaluate(choice_run.path)
    assert evaluation["nll"] == pytest.approx(metric(choice_run, "after", "nll"), rel=1e-6)
    rows = evaluation.predictions[:5]
    answers = list(predict(choice_run.path, [{"text": row["text"]} for row in rows]))
    assert [a["prediction"] for a in answers] == [row["prediction"] for row in rows]
    np.testing.assert_allclose([a["confidence"] for a in answers], [row["confidence"] for row in rows], rtol=1e-4)


def test_merged_export_predicts_the_same(choice_run: Run, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = export(choice_run.path, "merged", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(where).eval()
    adapted, tokenizer, _, _ = load_run(choice_run.path)
    ids = AutoTokenizer.from_pretrained(where)("Request: pay my bill\nTopic:", return_tensors="pt")["input_ids"]
    assert ids.tolist() == tokenizer("Request: pay my bill\nTopic:", return_tensors="pt")["input_ids"].tolist()
    with torch.no_grad():
        # merging adds B A to W once instead of to every output: fp32 rounding through 30 layers
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-3, atol=2e-3)


def test_150_packed_choices_score_like_150_strings() -> None:
    from acclimate.scoring import Item, score

    model, tokenizer = models.load_model("smollm2")
    words = sorted({row["intent"] for row in data.read_table("clinc150").rows})
    assert len(words) == 150
    choices = [tokenizer(" " + word.replace("_", " "))["input_ids"] for word in words]
    prompt = tokenizer("Request: what is my credit limit\nIntent:")["input_ids"]
    together = score(model, [Item(prompt, choices)], tokenizer.pad_token_id)[0]
    alone = score(model, [Item(prompt, [choice]) for choice in choices], tokenizer.pad_token_id)
    difference = [abs(a.total - b[0].total) for a, b in zip(together, alone, strict=True)]
    assert max(difference) < 1e-4


def test_sft_on_chats(tmp_path: Path) -> None:
    pairs = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Poland", "Warsaw"), ("Norway", "Oslo")] * 4
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Capital of {a}?"},
                {"role": "assistant", "content": f"=> {b.upper()}"},
            ]
        }
        for a, b in pairs
    ]
    train = {"max_steps": 6, "batch_size": 5, "lr": 2e-3, "save_every": 6}
    run = tune(
        model="smollm2",
        data=str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        task="sft",
        directory=tmp_path / "run",
        train=train,
    )
    assert metric(run, "after", "nll") < 0.5 * metric(run, "before", "nll")
    (answer,) = predict(run.path, [{"prompt": [{"role": "user", "content": "Capital of Italy?"}]}])
    assert answer["completion"].startswith("=>")  # the style that was taught, ended by the taught end token
    assert len(answer["completion"]) < 40


def test_dpo_prefers_what_it_was_taught(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"Question {i}: is {i} even?\nAnswer:",
            "chosen": f" {'Yes' if i % 2 == 0 else 'No'}.",
            "rejected": " I would rather not say.",
        }
        for i in range(20)
    ]
    train = {"max_steps": 5, "batch_size": 4, "lr": 1e-3, "save_every": 5, "warmup": 0.0}
    run = tune(
        model="smollm2",
        data=str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        task="dpo",
        directory=tmp_path / "run",
        train=train,
    )
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the adapter starts as the reference
    assert metric(run, "after", "margin") > metric(run, "before", "margin") + 1


def test_classify_with_the_embedded_encoder(tmp_path: Path) -> None:
    train = {"max_steps": 40, "batch_size": 16, "lr": 3e-3, "save_every": 40}
    run = tune(
        model="minilm", data="clinc150", task="classify", max_eval_samples=200, directory=tmp_path / "run", train=train
    )
    assert metric(run, "after", "accuracy") > 0.4  # chance is 0.1; measured 0.545 after these 40 steps
    assert "the classification head is new" in run.info["warnings"][-1]


def test_add_is_done_once() -> None:
    said: list[str] = []
    assert models.add("smollm2", said.append) == models.embedded_path("smollm2")
    assert said == []
    model, tokenizer = models.load_model("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = "naïve café 🙂 <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
