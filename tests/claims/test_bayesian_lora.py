"""The Bayesian-LoRA claim runs end to end at its smallest size; what is exact in it is exact. Its verdict there means nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig

from acclimate import metrics
from acclimate.claims import bayesian_lora
from acclimate.claims.bayesian_lora import ANSWERS, BATCH, CLAIM, LAMBDAS, LONGEST, SIZES, TARGETS, Bench
from acclimate_claims import bench_fast
from fast_benchmark import fast_benchmark

ARMS = {
    "untouched model",
    "lora",
    "lora + temperature",
    "bayesian-lora",
    "bayesian-lora, mean",
    "lora, tuned",
    "lora, MC dropout",
    "ensemble of 3 loras",
    "monteclora",
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(SIZES["fast"])


@pytest.mark.embedded
def test_fast_bench_measures_every_arm(tmp_path: Path) -> None:
    evidence = bench_fast("bayesian-lora", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    systems = {system for system, metric in rows if metric == "ece"}
    assert systems - {"laplace-lora"} == ARMS  # the package of the Laplace arm is the user's own
    assert {system for system, metric in rows if metric == "ms_per_step"} == {"lora", "bayesian-lora"}
    # q (576 x 576) and v (576 -> 192) of two blocks; per factor of rank 8: p + q, 18, 81 and 1 more
    lora = 2 * 8 * (576 + 576 + 576 + 192)
    assert rows["lora", "ece"]["parameters"] == lora
    assert rows["bayesian-lora", "ece"]["parameters"] == lora + 2 * (3 * 584 + 200 + 4 * 100)
    assert rows["ensemble of 3 loras", "ece"]["parameters"] == 3 * lora
    for system in systems:
        one = rows[system, "ece"]
        assert one["extra"]["definition"] == metrics.DEFINITION
        assert one["extra"]["classes"] == list(ANSWERS)
        for metric in ("ece", "nll", "accuracy", "ece_ood", "nll_ood", "accuracy_ood"):
            assert rows[system, metric]["mean"] >= 0
    # one temperature never changes which answer is first
    for metric in ("accuracy", "accuracy_ood"):
        assert rows["lora + temperature", metric]["mean"] == rows["lora", metric]["mean"]
    assert rows["bayesian-lora", "ece"]["extra"]["max_lambda"] in LAMBDAS
    assert rows["bayesian-lora", "ece"]["extra"]["epistemic"][0] > 0
    assert rows["bayesian-lora, mean", "ece"]["extra"]["epistemic"] == [0]


@pytest.mark.embedded
def test_no_sentence_is_in_two_sets(bench: Bench) -> None:
    parts = [bench.sets["test"], bench.sets["ood"], bench.train_rows(0, 16), bench.rows("validation", 0)]
    everything = [row for part in parts for row in part]
    assert len(set(everything)) == len(everything)
    assert [len(part) for part in parts] == [16, 12, 16, 16]
    assert max(bench.length.values()) <= LONGEST


@pytest.mark.embedded
def test_answers_are_those_of_the_whole_model(bench: Bench) -> None:
    """Stored states, upper blocks and a head of two rows give the whole model's softmax among the answers."""
    from acclimate.data import read_table

    rows = [row for split in ("train", "test") for row in read_table("sentiment3", split=split).rows]
    chosen = bench.sets["test"][:4]
    words = [bench.tokenizer(word)["input_ids"][0] for word in ANSWERS]
    expected = []
    for index in chosen:
        ids = torch.tensor([bench.tokenizer(bayesian_lora.PROMPT.format(**rows[index]))["input_ids"]])
        with torch.no_grad():
            expected.append(torch.softmax(bench.whole(input_ids=ids).logits[0, -1, words], -1).numpy())
        assert bench.label[index] == ["negative", "positive"].index(rows[index]["label"])
    found = bayesian_lora._probs(bench, bench.suffix(), "test", 0)[0, :4]
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.embedded
def test_arms_share_frozen_weights_and_batches(bench: Bench) -> None:
    first, second = bench.suffix(), bench.suffix()
    assert first.lm_head is not second.lm_head
    assert first.lm_head.weight is second.lm_head.weight
    before = {name: value.clone() for name, value in bench.upper.state_dict().items()}
    bayesian_lora._train(bench, LoraConfig(**TARGETS), bench.train_rows(0, 16), 1, 0)
    assert all(torch.equal(value, before[name]) for name, value in bench.upper.state_dict().items())
    rows = [*bench.sets["test"], *bench.sets["ood"]]
    found = [list(bayesian_lora._epochs(bench, rows, 2, seed)) for seed in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    for epoch in found[0]:
        assert sorted(row for batch in epoch for row in batch) == sorted(rows)
        assert all(len(batch) <= BATCH for batch in epoch)
    assert found[0][0] != found[0][1]


@pytest.mark.embedded
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """At its smallest size; its times are for people, not for asserts."""
    found = fast_benchmark("bayesian_lora", tmp_path)
    assert found["summary"].keys() == found["bars"].keys()
    assert all(value > 0 for value in found["summary"].values())
    assert found["prediction"]["adapted_blocks"] == 10


def test_sizes_keep_to_what_the_sample_has() -> None:
    """1,000 sentences of each source: 600 for the test at most leaves 400 to train on and to choose by."""
    for size in SIZES.values():
        assert size.test + max(count for _, count, _ in size.regimes) + size.held_out <= 980
        assert size.ood <= 500
        assert size.peer_seeds <= len(size.seeds)
    assert SIZES["default"].regimes == (("", 64, 30),)
    assert replace(SIZES["full"], layers=10) == SIZES["full"]
