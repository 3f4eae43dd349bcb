"""The FrameFT claim runs end to end at its smallest size; what is exact in it is exact. Its verdict at that size means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acclimate import data
from acclimate.adapters.frame import FrameFTConfig, suggest_lr
from acclimate.claims import frameft
from acclimate.claims.frameft import ARMS, CLAIM, CONTROLS, PEERS, Classifier, Encoded, batches, encode
from acclimate_claims import bench_fast
from fast_benchmark import fast_benchmark


@pytest.mark.embedded
def test_fast_bench_measures_every_system(tmp_path: Path) -> None:
    evidence = bench_fast("frameft", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    assert {system for system, metric in rows if metric == "accuracy"} == {*ARMS}
    assert {system for system, metric in rows if metric == "ms_per_step"} == {*PEERS}
    accuracy = {system: rows[system, "accuracy"] for system in ARMS}
    # 12 projections of 384 x 384: 500 coefficients each; r (d_in + d_out); r + d_out
    trained = dict.fromkeys(("frameft", "fourierft", *CONTROLS), 12 * 500)
    trained |= {"lora": 12 * 8 * 768, "vera": 12 * (64 + 384), "frozen encoder": 0}
    assert {system: row["parameters"] for system, row in accuracy.items()} == trained
    # float32 coefficients and one set of int32 positions, and a header that names the tensors
    assert 12 * 500 * 4 + 2 * 500 * 4 < accuracy["frameft"]["adapter_bytes"] < 32_000
    assert 73_728 * 4 < accuracy["lora"]["adapter_bytes"] < 73_728 * 4 + 8_000
    assert accuracy["frameft"]["peak_memory_bytes"] > 90_000_000  # the model alone
    for control in CONTROLS:
        gap = rows[f"frameft - {control}", "accuracy_difference"]
        assert gap["mean"] == pytest.approx(accuracy["frameft"]["mean"] - accuracy[control]["mean"])
        assert accuracy[control]["extra"]["lr"] == accuracy["frameft"]["extra"]["lr"]
    assert {len(row["extra"]["held_out_accuracy"]) for name, row in accuracy.items() if name in PEERS} == {3}


def test_every_method_chooses_from_as_many_rates_around_its_published_one() -> None:
    for name in PEERS:
        low, middle, high = ARMS[name].lrs
        assert middle / low == pytest.approx(3, rel=0.02)
        assert high / middle == pytest.approx(3, rel=0.02)
    assert ARMS["frameft"].lrs[1] == pytest.approx(suggest_lr(FrameFTConfig()))


def test_batches_hold_every_sentence_once_an_epoch() -> None:
    examples = Encoded([[0] * (1 + i * 7 % 40) for i in range(300)], torch.zeros(300))
    found = list(batches(examples, 2, seed=3))
    assert sorted(i for batch in found for i in batch) == sorted([*range(300)] * 2)
    assert found == list(batches(examples, 2, seed=3))
    assert found != list(batches(examples, 2, seed=4))
    padded = sum(len(batch) * max(len(examples.ids[i]) for i in batch) for batch in found)
    assert padded < 1.2 * 2 * sum(map(len, examples.ids))


@pytest.mark.embedded
def test_head_and_start_are_the_same_for_all() -> None:
    examples = encode(data.sample(data.read_table(frameft.DATA), 4, 0))
    frozen = Classifier(ARMS["frozen encoder"], 0).eval()
    with torch.no_grad():
        expected = frozen(examples.ids)
        # the mean over real tokens: alone, without padding, a sentence gets the same
        for row, ids in enumerate(examples.ids):
            torch.testing.assert_close(frozen([ids])[0], expected[row], rtol=1e-4, atol=1e-5)
        for name in PEERS:
            model = Classifier(ARMS[name], 0).eval()
            assert torch.equal(model.head.weight, frozen.head.weight)
            torch.testing.assert_close(model(examples.ids), expected, rtol=0, atol=1e-6)


def test_labels_are_of_sentences() -> None:
    rows = data.read_table(frameft.DATA, split="train").rows
    assert {row["label"] for row in rows} == {"positive", "negative"}


@pytest.mark.embedded
def test_benchmark_runs(tmp_path: Path) -> None:
    result = fast_benchmark("frameft", tmp_path)
    times = result["layer"]["layer_ms"]
    assert result["layer"]["layer_speedup_over_fourierft"] == pytest.approx(times["fourierft"] / times["frameft"])
    times = result["model"]["step_ms"]
    assert result["model"]["step_time_over_lora"] == pytest.approx(times["frameft"] / times["lora"])
