"""The claim of ProjQ runs end to end at its smallest size, and its arms are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from acclimate.claims import projq as claim
from acclimate.claims.projq import CLAIM, GPTQ, OURS, Judge, Made, bits_per_weight, loftq
from acclimate.compress.gptq import Grid, round_to_nearest
from acclimate.compress.projq import bits_per_weight as bits_of_files
from acclimate.compress.projq import quantize_projq
from acclimate_claims import bench_fast
from compress.small import ids, llama


@pytest.mark.embedded
def test_fast_bench_measures_every_arm(tmp_path: Path) -> None:
    evidence = bench_fast("projq", tmp_path)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    with_adapter = {system for system, metric in rows if metric == "excess loss at 3 bits"}
    assert with_adapter == {GPTQ, OURS, "RTN + compensation", "LoftQ"} | (
        {"HQQ + compensation"} if claim.hqq() else set()
    )
    assert ("GPTQ", "excess loss at 4 bits without adapter") in rows
    for tokens in ("calibration", "held-out"):
        assert rows[OURS, f"J over GPTQ's at 3 bits, rank 16, {tokens} tokens"]["mean"] > 0
    assert rows[OURS, "J over GPTQ's at 3 bits, rank 16, calibration tokens"]["mean"] <= 1 + 1e-9
    for system in (GPTQ, OURS):
        before, after = (rows[system, f"loss {when} training at 3 bits"]["values"] for when in ("before", "after"))
        assert before != after
    assert len(evidence["reasons"]) == len(CLAIM.bars)


def test_loftq_is_alternation_without_data() -> None:
    torch.manual_seed(0)
    W = torch.randn(48, 32)
    grid = Grid(2, 16)
    Q, B, A = loftq(W, grid, 4, iterations=1)
    torch.testing.assert_close(Q.dequantize(), round_to_nearest(W, grid).dequantize())
    error = W.double() - Q.dequantize().double()
    left = float((error - B @ A).square().sum())
    assert left == pytest.approx(float(torch.linalg.svdvals(error)[4:].square().sum()), rel=1e-9)
    again = loftq(W, grid, 4, iterations=2)[0]
    torch.testing.assert_close(again.dequantize(), round_to_nearest(W - B @ A, grid).dequantize())


def test_the_judge_scores_layers_in_place_and_counts_bits_as_files_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "GROUP", 16)  # the tiny model's layers are narrower than a group of the claim
    model, held = llama(), ids(3)
    judge = Judge(model, held)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    peft_model, _ = quantize_projq(llama(), held, bits=3, group_size=16, rank=4, progress=False)
    layers = {}
    for name, layer in peft_model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            A, B = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
            layers[name] = Made(layer.base_layer.dequantize(), B, A)
    for adapter in (True, False):
        row = judge.row(model, "x", 3, 0, layers, adapter)
        with torch.no_grad():
            for window, excess, dense in zip(held, row.values, judge.dense, strict=True):
                if adapter:
                    loss = peft_model(input_ids=window[None], labels=window[None]).loss
                else:
                    with peft_model.disable_adapter():
                        loss = peft_model(input_ids=window[None], labels=window[None]).loss
                assert excess == pytest.approx(float(loss) - dense, abs=1e-5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    files = bits_of_files(peft_model)
    # zero points of 3 bits fill whole words in files
    assert bits_per_weight(layers, 3, 4) == pytest.approx(files["total"], rel=0.02)
    assert bits_per_weight(layers, 3, 0) == pytest.approx(files["total"] - files["adapter"], rel=0.02)


def test_committed_evidence_belongs_to_this_claim() -> None:
    evidence = json.loads((Path(__file__).parents[2] / "evidence" / "projq.json").read_text())
    assert evidence["statement"] == CLAIM.statement
    assert evidence["budget"] == "default"
    assert len(evidence["reasons"]) == len(CLAIM.bars)
