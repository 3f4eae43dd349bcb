"""The LOZO+ claim runs end to end at its smallest size; what is exact in it is exact. Its verdict at that size means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acclimate.claims.lozo_plus import (
    ABLATIONS,
    CLAIM,
    METHODS,
    PERIODS,
    RATES,
    SIZE,
    SIZES,
    Digits,
    Quadratic,
    choices,
    passes_to,
)
from acclimate_claims import bench_fast


@pytest.mark.embedded
def test_fast_bench_measures_every_method(tmp_path: Path) -> None:
    evidence = bench_fast("lozo-plus", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    for task in "AB":
        assert {system for system, metric in rows if metric == f"loss {task}"} == {*METHODS, *ABLATIONS}
        assert 0 < rows["LOZO+", f"share of LOZO's passes {task}"]["mean"] <= 1
    assert {system for system, metric in rows if metric == "accuracy C"} == {
        "LOZO",
        "LOZO+",
        "AdamW",
        "warmed head alone",
    }


def test_every_method_chooses_from_the_same() -> None:
    size = SIZES["default"]
    for name in METHODS:
        found = list(choices(name, "B", size))
        assert {lr for lr, _ in found} == set(RATES["B"])
        assert {options.get("period") for _, options in found} == ({None} if name == "MeZO" else set(PERIODS))


def test_problems() -> None:
    quadratic = Quadratic(3)
    assert float(quadratic.loss()) == pytest.approx(0.5)
    spectrum = torch.linalg.svdvals(quadratic.target)
    assert spectrum[1] > 3 * spectrum[2]
    assert quadratic.target.shape == (SIZE, SIZE)
    digits = Digits(0)
    plain, turned = (float((digits.model(x).argmax(1) == digits.classes).float().mean()) for x in (digits.images.view(-1, 8, 8).rot90(-1, (1, 2)).reshape(-1, 64), digits.images))  # fmt: skip
    assert plain > 0.95
    assert turned < 0.5
    assert passes_to([5.0, 3.0, 2.0, 1.0], 2.5) == 0.75
    assert passes_to([5.0, 3.0], 1.0) == 1.0
