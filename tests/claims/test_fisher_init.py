"""The claim of Fisher initialisation runs end to end at its smallest size, and its parts do what they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from acclimate.claims import fisher_init as claim
from acclimate.claims.fisher_init import ARMS, CLAIM, SIZES, Digits, batches, run, start
from acclimate_claims import bench_fast

SMALL = dataclasses.replace(SIZES["fast"], train=16, test=16)


@pytest.mark.embedded
def test_fast_bench_measures_every_arm(tmp_path: Path) -> None:
    evidence = bench_fast("fisher-init", tmp_path)
    for task in SIZES["fast"].tasks:
        found = {row["system"]: row["mean"] for row in evidence["rows"] if row["metric"] == f"{task} early loss"}
        assert found.keys() == set(ARMS)
        # two steps in other directions: no arm ends where another does
        assert len({round(value, 7) for value in found.values()}) == len(ARMS)
    assert len(evidence["reasons"]) == len(CLAIM.bars)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_starts_at_the_model_itself(arm: str) -> None:
    task = Digits(SMALL)
    batch = task.batch(task.test[:8])
    plain = task.fresh().eval()
    model, seconds = start(task, arm, 0, task.train)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(pixel_values=batch["pixel_values"]).logits,
            plain(pixel_values=batch["pixel_values"]).logits,
            rtol=1e-4,
            atol=1e-4,
        )
    assert seconds > 0
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_" in name for name in trained)
    assert all("lora_" in name or "classifier" in name for name in trained)


def test_a_run_is_the_mean_loss_of_its_steps() -> None:
    task = Digits(SMALL)
    model, _ = start(task, "default", 0, task.train)
    found = run(task, model, 1e-9, 0, task.train)
    plain = task.fresh().train()
    expected = [
        float(loss.detach()) / count
        for loss, count, _ in (task.loss(plain, task.batch(i)) for i in batches(task.train, claim.BATCH, 0))
    ]
    assert found["early loss"] == pytest.approx(sum(expected) / 2, rel=1e-4)  # a rate of 1e-9 leaves the model alone
    assert found["seconds"] > 0


def test_committed_evidence_belongs_to_this_claim() -> None:
    evidence = json.loads((Path(__file__).parents[2] / "evidence" / "fisher-init.json").read_text())
    assert evidence["statement"] == CLAIM.statement
    assert evidence["budget"] == "default"
    assert len(evidence["reasons"]) == len(CLAIM.bars)
