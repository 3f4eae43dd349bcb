"""The CircuMerge claim runs end to end at its smallest size; the mergers in it are what they say. Its verdict at that size means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acclimate.claims import circumerge as claim
from acclimate.claims import zero_shot
from acclimate.claims.circumerge import CLAIM, OURS, PEFT_TYPES, RULES, SIZES, Pairs, core_space, knots, product
from acclimate.merge import MergeSettings
from acclimate.merge.circumerge import merge_core
from acclimate_claims import bench_fast
from fast_benchmark import fast_benchmark
from merge.synthetic import pair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(tmp_path: Path) -> dict:
    return bench_fast("circumerge", tmp_path)


@pytest.mark.embedded
def test_fast_bench_measures_every_system(bench: dict) -> None:
    assert len(bench["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in bench["rows"]}
    cut = {system for system, metric in rows if metric == "normalised_accuracy"}
    peers = {"core space", "knots", "better of core space and knots"}
    uncut = {*OURS, *peers, *(f"circumerge, {rule}" for rule in SIZES["fast"].rules)}
    assert cut == {*uncut, "base", "best of peft", *(f"peft {kind}" for kind in PEFT_TYPES)}
    assert {system for system, metric in rows if metric == "normalised_accuracy_uncut"} == uncut
    assert {system for system, metric in rows if metric == "smollm2_ms_per_block"} == {*OURS, "core space", "knots"}
    assert set(rows["circumerge", "normalised_accuracy"]["extra"]["rules"]) <= set(SIZES["fast"].rules)


def pairs(tasks: int = 3) -> Pairs:
    found = []
    for task in range(tasks):
        a, b = pair(40, 30, 4, task)
        found.append((b, a))
    return found


def ours(found: Pairs, rule: str) -> torch.Tensor:
    b_rows = torch.cat([b.T for b, _ in found])[None]
    a_rows = torch.cat([a for _, a in found])[None]
    settings = MergeSettings(rule=rule, basis="svd", density=claim.DENSITY, drop=claim.DROP)
    one = torch.ones(1, dtype=torch.float64)
    core = merge_core(b_rows, a_rows, [4] * len(found), [one] * len(found), [1.0] * len(found), settings, ["layer"])
    a, b = core.factors(12)
    return b[0] @ a[0]


@pytest.mark.parametrize("rule", RULES)
def test_core_space_as_published_is_our_basis_svd(rule: str) -> None:
    found = pairs()
    b, a = core_space(found).merge(rule, "layer", 12)
    torch.testing.assert_close(product(b, a), ours(found, rule), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["sum", "tsv", "iso", "tsv_iso"])
def test_knots_differs_in_rules_that_look_at_entries_only(rule: str) -> None:
    found = pairs()
    b, a = knots(found).merge(rule, "layer", 12)
    torch.testing.assert_close(product(b, a), ours(found, rule), rtol=0, atol=1e-9)


def test_knots_ties_by_hand() -> None:
    found = pairs()
    left, sigma, right = torch.linalg.svd(torch.cat([product(b, a) for b, a in found], 1), full_matrices=False)
    tasks = (sigma[:12, None] * right[:12]).chunk(3, 1)
    kept = []
    for task in tasks:
        smallest = task.abs().flatten().sort(descending=True).values[round(claim.DENSITY * task.numel()) - 1]
        kept.append(torch.where(task.abs() >= smallest, task, 0.0))
    sign = sum(kept).sign()
    agreeing = [torch.where(task.sign() == sign, task, 0.0) for task in kept]
    count = sum((task != 0).double() for task in agreeing)
    b, a = knots(found).merge("ties", "layer", 12)
    torch.testing.assert_close(product(b, a), left[:, :12] @ (sum(agreeing) / count.clamp_min(1)), rtol=0, atol=1e-9)


@pytest.mark.embedded
def test_accuracies_are_those_of_the_changed_encoder() -> None:
    examples = claim.sentences("test", [0, 1], 1)
    name = "encoder.layer.3.output.dense"
    delta = {name: torch.randn(384, 1536, generator=torch.Generator().manual_seed(0))}
    model = zero_shot.fresh()
    model.get_submodule(name).weight.data += 0.1 * delta[name]
    tasks, joint = claim.accuracies(delta, 0.1, examples)
    assert joint == zero_shot.accuracy(model, examples)
    first = examples.part([i for i, label in enumerate(examples.labels) if label < 15])
    assert tasks[0] == zero_shot.accuracy(model, zero_shot.Sentences(first.ids, first.labels, examples.heads[:15]))
    assert claim.accuracies({}, 1.0, examples)[1] == zero_shot.accuracy(zero_shot.fresh(), examples)
    assert joint != claim.accuracies({}, 1.0, examples)[1]


@pytest.mark.embedded
def test_merge_benchmark_runs(tmp_path: Path) -> None:
    result = fast_benchmark("merge", tmp_path)
    tiny = result["merge"]["tiny"]
    assert tiny["ms_per_block"].keys() == {*OURS, "core space", "knots", "peft svd"}
    assert tiny["over_core_space"]["gram"] == pytest.approx(
        tiny["ms_per_block"]["gram"] / tiny["ms_per_block"]["core space"]
    )
    assert result["soup"]["matrices"][0]["relative_error"]["auto"] < 1e-12
    assert all(megabytes > 50 for megabytes in result["memory"].values())
