"""The LoRA claim runs end to end at its smallest size. Its verdict at that size means nothing and is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from acclimate.claims.lora import CLAIM, LEARNING_RATE, features
from acclimate.scoring import Item
from acclimate.tasks.base import Examples
from acclimate_claims import bench_fast


@pytest.mark.embedded
def test_fast_bench_measures_every_system(tmp_path: Path) -> None:
    evidence = bench_fast("lora", tmp_path)
    systems = {row["system"] for row in evidence["rows"]}
    assert systems == {*LEARNING_RATE, "frozen features + logistic regression"}
    by_key = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    assert by_key["lora", "accuracy"]["parameters"] == 2_442_240
    assert by_key["full", "accuracy"]["parameters"] == 134_515_008
    assert 0 < by_key["lora", "accuracy"]["peak_memory_bytes"] < by_key["full", "accuracy"]["peak_memory_bytes"]
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    # one step at each system's own rate: the two have left the untouched model in different directions
    assert by_key["lora", "nll"]["mean"] != pytest.approx(by_key["full", "nll"]["mean"], rel=1e-3)


def test_features_are_the_mean_over_real_tokens(tiny_lm: Path) -> None:
    import torch

    from acclimate.models import load_model

    class Wrapped:
        def __init__(self, prompt: list[int]) -> None:
            self.item = Item(prompt, [[5]])

    model, tokenizer = load_model(str(tiny_lm))
    model.eval()
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    found = features(model, tokenizer, Examples([Wrapped(p) for p in prompts], [], []))
    for row, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            alone = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(row, alone, rtol=1e-4, atol=1e-6)


def test_committed_evidence_belongs_to_this_claim() -> None:
    file = Path(__file__).parents[2] / "evidence" / "lora.json"
    evidence = json.loads(file.read_text())
    assert evidence["statement"] == CLAIM.statement
    assert evidence["budget"] == "default"
    assert len(evidence["reasons"]) == len(CLAIM.bars)
