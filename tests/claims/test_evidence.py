"""What is committed in evidence/ is of the claims as they stand now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acclimate import methods
from acclimate.claims.base import load_claim

EVIDENCE = Path(__file__).parents[2] / "evidence"
READY = sorted({row.claim for row in methods.all_methods() if row.claim and row.status == "ready"})


@pytest.mark.parametrize("module", READY)
def test_committed_evidence_belongs_to_its_claim(module: str) -> None:
    claim = load_claim(module)
    evidence = json.loads((EVIDENCE / f"{claim.name}.json").read_text())
    assert evidence["statement"] == claim.statement
    assert evidence["budget"] == "default"
    assert len(evidence["reasons"]) == len(claim.bars)
    assert (EVIDENCE / f"{claim.name}.svg").exists()
