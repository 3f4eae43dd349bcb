"""Tunes one small run per task; started with and without `accelerate launch` by test_distributed.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def main() -> None:
    torch.set_num_threads(1)
    from acclimate import tune

    plan = json.loads(Path(sys.argv[1]).read_text())
    for name, settings in plan.items():
        tune(directory=Path(sys.argv[2]) / name, **settings)


if __name__ == "__main__":
    main()
