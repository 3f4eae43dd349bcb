"""The benchmark runs at its smallest size, and what is exact in it is exact. Its times are for people, not for asserts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fast_benchmark import fast_benchmark

ROOT = Path(__file__).parents[1]


@pytest.mark.embedded
def test_overhead_runs(tmp_path: Path) -> None:
    result = fast_benchmark("overhead", tmp_path)
    assert result["overhead"].keys() >= {"step_time_ratio", "peak_memory_ratio", "startup_difference_seconds"}
    assert result["scoring"]["choices"] == 150
    assert result["scoring"]["largest_difference"] < 1e-4
    assert result["label_only"].keys() >= {"time_ratio", "memory_growth_ratio"}


@pytest.mark.embedded
def test_fisher_init_runs(tmp_path: Path) -> None:
    result = fast_benchmark("fisher_init", tmp_path)
    assert result["rows"] == 2
    assert result["q and v"].keys() == {"lora-ga_ratio", "eva_ratio", "epoch_ratio", "seconds"}
    assert all(len(values) == 1 for values in result["q and v"]["seconds"].values())


@pytest.mark.embedded
def test_whitening_runs(tmp_path: Path) -> None:
    result = fast_benchmark("whitening", tmp_path)
    assert result["refresh"]["ratio"].keys() == {"none", "block", "group", "none, cholesky", "group, cholesky"}
    assert result["inference"]["rank"] == 76  # 0.6 x 256 / 2
    assert result["inference"]["bytes_ratio"] <= 0.6
    assert result["gram"]["ratio"]["moments"] > 0


def test_projq_runs(tmp_path: Path) -> None:
    result = fast_benchmark("projq", tmp_path)
    assert result["target"] == pytest.approx(7.2)
    found = result["layers"]["64 x 128"]
    assert found["seconds"].keys() == {"pass", "gptq", "projq"}
    assert 1 < found["passes"] <= 6
    assert found["to_pass"] > found["to_gptq"] > 0


@pytest.mark.embedded
def test_optim_runs(tmp_path: Path) -> None:
    result = fast_benchmark("optim", tmp_path)
    adamw, ours = result["training"]["adamw"], result["training"]["lora, lozo-plus"]
    assert adamw["gradients"] == adamw["weights"]
    assert adamw["states"] == pytest.approx(2 * adamw["weights"], rel=1e-4)
    assert ours["gradients"] == 0
    assert ours["states"] < 0.01 * adamw["states"]
    for shapes in ("lora", "full"):
        assert result["muon"][shapes]["state_bytes"] == result["muon"][shapes]["state_bytes_by_formula"]
    assert result["lsr1"]["10 unknowns"]["ratio"].keys() == {"l-bfgs", "sr1", "generic"}
    assert result["surge"]["ratio"].keys() == {"torch", "ste", "surge", "surge, shared"}
    ways = {"two passes", "lozo-plus", "lozo-plus, paired", "lozo, in place", "mezo"}
    assert result["forward only"]["16 tokens"]["ratio"].keys() == ways


def test_the_committed_numbers_are_those_the_docs_show() -> None:
    result = json.loads((ROOT / "benchmarks" / "overhead.json").read_text())
    text = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
    shown = (
        result["overhead"]["step_time_ratio"],
        result["overhead"]["peak_memory_ratio"],
        result["label_only"]["time_ratio"],
        result["label_only"]["memory_growth_ratio"],
    )
    for number in shown:
        assert f"{number:.2f}" in text
    assert f"{result['scoring']['throughput_ratio']:.0f} times" in text
