"""The claim of Muon runs end to end at its smallest size, and its experiment is what it says. Its verdict at that size means nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from acclimate.claims import muon_mismatch as claim
from acclimate.claims.muon_mismatch import CELLS, CLAIM, CONTEXT, LRS, BytesGPT, adapted, held_out, loss_of, text
from acclimate_claims import bench_fast


@pytest.mark.embedded
def test_fast_bench_measures_every_way(tmp_path: Path) -> None:
    evidence = bench_fast("muon-mismatch", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    names = {f"{by}, then {optimizer} ({mode})" for by, mode, optimizer in CELLS}
    for metric in ("perplexity", "forgetting", "cosine_distance", "relative_change"):
        assert {system for system, name in rows if name == metric} == names
    gaps = {}
    for mode in ("full", "lora"):
        for by, other in (("adamw", "muon"), ("muon", "adamw")):
            own, foreign = (rows[f"{by}, then {o} ({mode})", "perplexity"]["mean"] for o in (by, other))
            gaps[mode, by] = foreign - own
            assert rows[f"{mode}, pretrained with {by}", "perplexity_gap"]["mean"] == pytest.approx(
                foreign - own, abs=1e-3
            )
    excess = sum(gaps["lora", by] - 0.6 * gaps["full", by] for by in ("adamw", "muon")) / 2
    found = rows["mean of both", "perplexity_gap_of_lora_above_six_tenths_of_full"]["mean"]
    assert found == pytest.approx(excess, abs=1e-3)
    assert {system for system, name in rows if name == "accuracy"} == {
        f"MiniLM, {name}" for name in claim.SENTENCE_SYSTEMS
    }


def test_all_ways_choose_from_as_many_rates() -> None:
    assert set(LRS) == set(CELLS)
    assert len(CELLS) == 8
    for rates in LRS.values():
        assert len(rates) == 3
        for low, high in itertools.pairwise(rates):
            assert 3 <= high / low <= 10 / 3 + 1e-9


def test_development_and_test_text_are_of_different_sentences() -> None:
    dev, test = held_out("dev", 50), held_out("test", 50)
    assert dev.shape == test.shape == (50, CONTEXT + 1)
    whole = bytes(text("held-out reviews").tolist())
    middle = len(whole) // 2
    assert all(whole.index(bytes(row.tolist())) + CONTEXT + 1 <= middle for row in dev)
    assert all(whole.rindex(bytes(row.tolist())) >= middle for row in test)


def test_the_model_sees_only_the_past_and_lora_starts_at_the_base() -> None:
    torch.manual_seed(0)
    model, windows = BytesGPT(), held_out("dev", 2)
    changed = windows.clone()
    changed[:, 60] = (changed[:, 60] + 1) % 256
    before, after = model(windows[:, :-1]), model(changed[:, :-1])
    torch.testing.assert_close(before[:, :60], after[:, :60])
    assert not torch.allclose(before[:, 60:], after[:, 60:])
    lora = adapted(model, "lora", 0)
    torch.testing.assert_close(loss_of(lora, windows), loss_of(model, windows))
    trained = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    assert trained == 4 * claim.RANK * (4 * 256 + 2 * 640)
    assert sum(p.numel() for p in model.parameters()) == 870_656
