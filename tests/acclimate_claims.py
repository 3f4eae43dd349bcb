"""Running a claim's smallest experiment through the command line, as every claim's test does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from acclimate.cli.common import run_app


def bench_fast(name: str, where: Path) -> dict[str, Any]:
    """`acclimate bench NAME --fast`; the evidence it wrote, checked for what any evidence must have."""
    assert run_app(["bench", name, "--fast", "--quiet", "-o", str(where)]) == 0
    evidence = json.loads((where / f"{name}.json").read_text())
    assert evidence["budget"] == "fast"
    assert evidence["verdict"] in ("holds", "does-not-hold", "inconclusive")
    assert evidence["rows"]
    assert (where / f"{name}.svg").read_text().startswith("<?xml")
    return evidence
