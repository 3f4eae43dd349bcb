"""A benchmark at its smallest size. What is exact in it can be asserted; its times are for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def fast_benchmark(name: str, where: Path) -> dict[str, Any]:
    """What `benchmarks/NAME.py --fast` writes, run in a process of its own with one thread."""
    output = where / f"{name}.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--fast", "--output", str(output)]
    subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True)
    found: dict[str, Any] = json.loads(output.read_text())
    return found
