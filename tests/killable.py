"""A run that a test can kill: its own module, so that a fork server can have everything imported already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import acclimate.report
import acclimate.tasks.choice  # noqa: F401
from acclimate.pipeline import tune


def work(directory: str, settings: dict[str, Any] | None, log: str) -> None:
    """Start a run with these settings, or resume it when there are none."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = Path(log).open("a")  # noqa: SIM115 - lives as long as the process
    if settings is None:
        tune(directory=directory, resume=True)
    else:
        tune(directory=directory, **settings)
