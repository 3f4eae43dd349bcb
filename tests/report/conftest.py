"""A run directory and a comparison directory with everything in them, made from simulated predictions."""

import json
from pathlib import Path

import numpy as np
import pytest

from acclimate import metrics

CLASSES = [f"{verb}_{noun}" for verb in ("open", "close", "report", "freeze") for noun in ("account", "card", "claim", "transfer", "statement")]  # fmt: skip
HOSTILE = "<script>alert('x')</script> & \"$5\" & $6 in 日本語"


def simulate(n, strength, seed, sharpness=1.0):
    """(probs (n, 20), labels (n,)) of a model that knows `strength` and is over-confident by `sharpness`."""
    rng = np.random.default_rng(0)
    labels = rng.integers(len(CLASSES), size=n)
    z = rng.normal(size=(n, len(CLASSES))) + 0.5 * np.random.default_rng(seed).normal(size=(n, len(CLASSES)))
    z[np.arange(n), labels] += strength * (0.6 + 0.8 * (labels % 5) / 5)
    e = np.exp(sharpness * (z - z.max(axis=1, keepdims=True)))
    return e / e.sum(axis=1, keepdims=True), labels


def entry(probs, labels):
    correct = probs.argmax(axis=1) == labels
    return {
        "metrics": metrics.summarise(probs, labels, n_resamples=100),
        "reliability": metrics.reliability_table(probs, labels),
        "classes": CLASSES,
        "per_class": [
            {"class": name, "n": int((labels == i).sum()), "accuracy": float(correct[labels == i].mean())}
            for i, name in enumerate(CLASSES)
        ],
        "definition": metrics.DEFINITION,
        "seconds": 12.3,
        "truncated": 2,
        "n": len(labels),
    }


def per_row(probs, labels):
    p = np.maximum(probs[np.arange(len(labels)), labels], 1e-12)
    return {
        "accuracy": (probs.argmax(axis=1) == labels).astype(float),
        "nll": -np.log(p),
        "brier": np.square(probs - np.eye(len(CLASSES))[labels]).sum(axis=1),
    }


def difference(name_a, name_b, a, b, metric):
    higher = metrics.HIGHER_IS_BETTER[metric]
    d = metrics.paired_difference(a, b, n_resamples=500)
    return {
        **d.to_dict(),
        "verdict": metrics.verdict(d, higher),
        "words": metrics.in_words(name_a, name_b, metric, d, higher),
    }


def predictions(probs, labels):
    rows = []
    for i, (p, label) in enumerate(zip(probs, labels, strict=True)):
        text = (
            HOSTILE
            if i % 2
            else f"Could you please {CLASSES[label].replace('_', ' my ')}? I have tried number {i} twice."
        )
        rows.append(
            {
                "id": i,
                "text": text,
                "label": CLASSES[label],
                "prediction": CLASSES[int(p.argmax())],
                "confidence": float(p.max()),
                "nll": float(-np.log(max(p[label], 1e-12))),
                "correct": bool(p.argmax() == label),
            }
        )
    return rows


def write_json(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_jsonl(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


RUN = {
    "acclimate": "0.1.0",
    "name": "clinc150-lora",
    "model": "SmolLM2-135M",
    "status": "done",
    "stage": "report",
    "created": "2025-11-30T10:02:00+00:00",
    "seed": 7,
    "versions": {"torch": "2.13.0", "transformers": "5.24.1", "peft": "0.21.2"},
    "git": {"commit": "0123abc", "dirty": True},
    "hardware": {"device": "cpu", "cpu": "Some CPU @ 2.5 GHz", "cores": 2, "memory_gb": 7.8, "gpus": [], "processes": 1},
    "timings": {"load": 3.2, "evaluate before": 12.3, "train": 151.0, "evaluate after": 11.9, "report": 1.1},
    "parameters": {"total": 134515008, "trainable": 460800},
    "peak_memory_bytes": 1_234_567_890,
    "adapter_bytes": 1_848_320,
    "steps": 120,
    "seconds_per_step": 1.258,
    "tokens": 48211,
    "data": {"source": "bundled sample", "train_rows": 960, "eval_rows": 400, "skipped": 0, "truncated_train": 3,
             "truncated_eval": 2, "overlap": 4, "duplicates": 1},
    "warnings": [f"4 evaluation rows are also in the training data. {HOSTILE}"],
    "method": {"task": "choice", "adapter": "lora", "init": None, "optimizer": "adamw"},
    "error": None,
    "artifacts": {"adapter": "adapter/", "predictions": "predictions.jsonl"},
}  # fmt: skip


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "clinc150-lora"
    before, labels = simulate(400, 1.2, 1)
    after, _ = simulate(400, 3.2, 2, sharpness=1.6)
    a, b = per_row(after, labels), per_row(before, labels)
    write_json(directory / "run.json", RUN)
    write_json(
        directory / "evaluation.json",
        {
            "task": "choice",
            "before": entry(before, labels),
            "after": entry(after, labels),
            "differences": {m: difference("lora", "base", a[m], b[m], m) for m in a},
        },
    )
    write_jsonl(directory / "predictions.jsonl", predictions(after, labels))
    write_jsonl(directory / "predictions_before.jsonl", predictions(before, labels))
    rng = np.random.default_rng(0)
    loss = [{"step": i, "epoch": i / 60, "loss": 3 * np.exp(-i / 40) + 0.4 + 0.1 * rng.normal(), "grad_norm": 1.0, "learning_rate": 1e-4} for i in range(1, 121)]  # fmt: skip
    write_jsonl(directory / "metrics.jsonl", loss + [{"step": i, "eval_loss": 3 * np.exp(-i / 40) + 0.5} for i in (40, 80, 120)])  # fmt: skip
    (directory / "recipe.yaml").write_text(f"model: SmolLM2-135M\nadapter: lora\nnote: {HOSTILE}\n", encoding="utf-8")
    return directory


@pytest.fixture
def comparison_directory(tmp_path):
    directory = tmp_path / "which-adapter"
    base_probs, labels = simulate(400, 1.2, 1)
    rows, cells = {"base": [per_row(base_probs, labels)]}, []
    for k, (name, strength, trainable) in enumerate(
        [
            ("adapter=lora", 3.2, 460800),
            ("adapter=bayesian-lora", 3.3, 921600),
            ("adapter=frame", 2.6, 23040),
            (f"adapter={HOSTILE}", 3.0, 134515008),
        ]
    ):
        probs = [simulate(400, strength, 10 * k + seed + 2)[0] for seed in range(3)]
        rows[name] = [per_row(p, labels) for p in probs]
        cells.append(
            {
                "name": name,
                "settings": {"adapter": name.removeprefix("adapter=")},
                "metrics": metrics.summarise(probs[0], labels, n_resamples=100),
                "reliability": metrics.reliability_table(probs[0], labels),
                "trainable": trainable,
                "peak_memory_bytes": int(1.1e9 + 2e8 * k),
                "seconds_per_step": 1.1 + 0.2 * k,
                "train_seconds": 130.0 + 24 * k,
                "adapter_bytes": 4 * trainable,
                "runs": [
                    {
                        "seed": seed,
                        "path": f"cells/{k} #{seed}",
                        "status": "done",
                        "metrics": {m: float(v.mean()) for m, v in rows[name][seed].items()},
                        "loss": [[i, 3 * np.exp(-i / (30 + 8 * k)) + 0.4 + 0.03 * seed] for i in range(5, 121, 5)],
                    }
                    for seed in range(3)
                ],
                "error": None,
            }
        )
    cells.append({"name": "adapter=broken", "settings": {}, "metrics": {}, "runs": [], "error": "rank is 0 <b>"})

    def stacked(name, metric):
        return np.stack([seed[metric] for seed in rows[name]])

    differences = [
        {
            "a": a,
            "b": b,
            "metric": "accuracy",
            **difference(a, b, stacked(a, "accuracy"), stacked(b, "accuracy"), "accuracy"),
        }
        for a, b in [(name, "base") for name in rows if name != "base"] + [("adapter=bayesian-lora", "adapter=lora")]
    ]
    write_json(
        directory / "compare.json",
        {
            "task": "choice",
            "metric": "accuracy",
            "higher_is_better": True,
            "budget": "120 steps",
            "n_examples": 400,
            "seeds": [0, 1, 2],
            "base": {
                "name": "base",
                "metrics": metrics.summarise(base_probs, labels, n_resamples=100),
                "reliability": metrics.reliability_table(base_probs, labels),
            },
            "cells": cells,
            "differences": differences,
            "conclusion": [differences[0]["words"], differences[-1]["words"]],
        },
    )
    return directory
