"""The SURGE claim runs end to end at its smallest size; what is exact in it is exact. Its verdict at that size means nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from acclimate.claims.surge import CLAIM, ETAS, PEERS, SIZES, digits, network, run
from acclimate.compress.surge import SurgeConfig, binary_layers
from acclimate_claims import bench_fast


def test_fast_bench_measures_every_estimator(tmp_path: Path) -> None:
    evidence = bench_fast("surge", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    measured = {system for system, metric in rows if metric == "training loss"}
    assert measured >= {*PEERS, "SURGE", "SURGE, shared", "SURGE, fixed lambda 1"}
    assert len(measured) == len(PEERS) + 3 + len(ETAS) - 1
    assert {system for system, metric in rows if metric == "ms per step"} == {"STE", "SURGE", "SURGE, shared"}


def test_rows_do_not_overlap_and_every_estimator_starts_alike() -> None:
    size = SIZES["default"]
    parts = digits(size.rows)
    assert [len(y) for _, y in parts] == list(size.rows)
    rows = torch.cat([x.flatten(1) for x, _ in parts])
    assert len(torch.unique(rows, dim=0)) == sum(size.rows)
    shares = [torch.bincount(y) / len(y) for _, y in parts]
    assert all((share - 0.1).abs().max() < 0.01 for share in shares)
    plain, ours = network(PEERS["STE"], 8, 3), network(SurgeConfig(), 8, 3)
    assert len(list(binary_layers(ours))) == 5
    state = ours.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_a_run_repeats() -> None:
    size = SIZES["fast"]
    assert run(SurgeConfig(), size, 1) == run(SurgeConfig(), size, 1)
