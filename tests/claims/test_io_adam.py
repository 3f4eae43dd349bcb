"""The IO-Adam claim runs end to end at its smallest size; what is exact in it is exact. Its verdict at that size means nothing."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from acclimate.claims import io_adam
from acclimate.claims.io_adam import CLAIM, COMPARED, PEERS, ByteModel, batches, best
from acclimate_claims import bench_fast


@pytest.mark.embedded
def test_fast_bench_measures_every_system(tmp_path: Path) -> None:
    evidence = bench_fast("io-adam", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    for metric in ("loss", "training_bytes", "gradient_and_state_bytes", "state_bytes", "peak_bytes", "ms_per_step"):
        assert {system for system, found in rows if found == metric} == {*COMPARED}
    assert {system for system, metric in rows if metric == "accuracy"} == {"adamw", "io-adam"}
    # the same arithmetic: three steps do not show the order of summation
    assert rows["io-adam, fused", "loss"]["mean"] == pytest.approx(rows["io-adam", "loss"]["mean"], rel=1e-4)
    # by hand: embeddings, norms, biases with two moments; 13 linear weights with one and their factors; a counter each
    model = ByteModel(0)
    count = sum(p.numel() for p in model.parameters())
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    factored, sides = sum(w.numel() for w in linear), sum(sum(w.shape) for w in linear)
    states = {"adamw": 8 * count, "io-adam": 8 * count - 4 * factored + 4 * sides}
    states["io-adam, fused"] = states["io-adam"]
    grads = {"adamw": 4 * count, "io-adam": 4 * count, "io-adam, fused": 4 * (count - factored)}
    counters = 4 * len(list(model.parameters()))
    for system in COMPARED:
        assert rows[system, "state_bytes"]["mean"] == pytest.approx(states[system] + counters, rel=1e-5)
        training = 4 * count + grads[system] + states[system] + counters
        assert rows[system, "training_bytes"]["mean"] == pytest.approx(training, rel=1e-5)


def test_peers_choose_from_as_many_rates_as_ours() -> None:
    for name, peer in PEERS.items():
        assert len(peer.language_rates) == (0 if name == "io-adam, fused" else 3)
        assert len(peer.sentiment_rates) in (0, 2)
    assert PEERS["io-adam"].language_rates == PEERS["adamw"].language_rates
    assert PEERS["io-adam"].sentiment_rates == PEERS["adamw"].sentiment_rates
    assert best({0.1: 2.0, 0.2: float("nan"), 0.3: 1.5}) == 0.3


def test_text_windows_and_batches() -> None:
    text = io_adam.text("validation")
    assert 0 <= int(text.min()) <= int(text.max()) < 256
    found = io_adam.windows(torch.arange(1000), 4, 0)
    assert torch.equal(found - found[:, :1], torch.arange(io_adam.CONTEXT + 1).expand(4, -1))
    epoch = list(islice(batches(40, 0), 2))
    assert len({i for batch in epoch for i in batch}) == 32
    assert len(next(batches(5, 0))) == 5


def test_the_byte_model_is_causal() -> None:
    model = ByteModel(0).eval()
    ids = torch.randint(256, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert (before[0, 5:] - after[0, 5:]).abs().max() > 1e-4
