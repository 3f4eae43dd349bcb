"""The claim of shift-aware whitening runs end to end at its smallest size, and its peers are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from acclimate.claims import shift_aware_whitening as claim
from acclimate.claims.shift_aware_whitening import CLAIM, DEFAULT, OURS, STATIC, Judge, scaled_svd, scalings
from acclimate.compress import LowRankLinear
from acclimate_claims import bench_fast
from compress.small import ids, llama


@pytest.mark.embedded
def test_fast_bench_measures_every_arm(tmp_path: Path) -> None:
    evidence = bench_fast("shift-aware-whitening", tmp_path)
    found = {row["system"]: row for row in evidence["rows"] if row["metric"] == "loss at 0.2, calibration 0"}
    assert found.keys() == {"dense", "SVD", "ASVD", "FWSVD", STATIC, OURS, DEFAULT}
    sizes = {name: row["parameters"] for name, row in found.items()}
    assert len({size for name, size in sizes.items() if name != "dense"}) == 1  # the same ranks
    assert sizes["SVD"] < sizes["dense"]
    assert len({round(row["mean"], 6) for row in found.values()}) == len(found)
    assert {row["system"] for row in evidence["rows"] if row["metric"].startswith("LoRA")} == {
        "default start",
        "principal start",
    }
    assert len(evidence["reasons"]) == len(CLAIM.bars)


def test_peers_are_the_best_in_their_coordinates() -> None:
    model, calibration = llama().float(), ids(3)
    peers = scalings(model, calibration)
    name = "model.layers.1.mlp.up_proj"
    W = model.get_submodule(name).weight.detach().double()
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(input_ids=calibration)
    handle.remove()
    columns = seen[0].abs().flatten(0, 1).mean(0).sqrt().double()
    torch.testing.assert_close(peers["ASVD"][1][name], columns, rtol=1e-4, atol=1e-6)
    squares = torch.zeros(len(W), dtype=torch.float64)
    for row in calibration:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        squares += model.get_submodule(name).weight.grad.double().square().sum(1)
    torch.testing.assert_close(peers["FWSVD"][0][name], squares.sqrt(), rtol=1e-4, atol=1e-9)
    for system, left, right in (
        ("SVD", torch.ones(48).double(), torch.ones(32).double()),
        ("ASVD", torch.ones(48).double(), columns),
        ("FWSVD", squares.sqrt(), torch.ones(32).double()),
    ):
        made = scaled_svd(model, 0.4, peers[system][0], peers[system][1])
        layer = made.get_submodule(name)
        assert isinstance(layer, LowRankLinear)
        scaled = left[:, None] * W * right
        gap = left[:, None] * (W - layer.weight.detach().double()) * right
        best = torch.linalg.svdvals(scaled)[layer.rank :].square().sum()
        assert float(gap.square().sum() / best) == pytest.approx(1, rel=1e-3)
    assert isinstance(model.get_submodule(name), nn.Linear)


def test_the_judge_scores_windows() -> None:
    model, other, held = llama(), llama(seed=1), ids(3)
    loss, error = Judge(model, held).rows("x", 0.2, 0, other, 1.0)
    for number, window in enumerate(held):
        assert loss.values[number] == pytest.approx(
            float(other(input_ids=window[None], labels=window[None]).loss), rel=1e-5
        )
    with torch.no_grad():
        a, b = (m.model(held).last_hidden_state for m in (model, other))
    expected = ((a - b).norm(dim=2) / a.norm(dim=2)).mean(1)
    torch.testing.assert_close(torch.tensor(error.values), expected, rtol=1e-4, atol=1e-5)
    assert claim.Judge(model, held).rows("x", 0.2, 0, model, 0.0)[1].mean == 0


def test_committed_evidence_belongs_to_this_claim() -> None:
    evidence = json.loads((Path(__file__).parents[2] / "evidence" / "shift-aware-whitening.json").read_text())
    assert evidence["statement"] == CLAIM.statement
    assert evidence["budget"] == "default"
    assert len(evidence["reasons"]) == len(CLAIM.bars)
