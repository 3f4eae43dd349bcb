"""How the weights move: optimisers that PyTorch, transformers' Trainer and Accelerate take like any other.

The public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate.optim.muon import Muon, MuonFactory, build_muon
    from acclimate.optim.muon_routing import muon_param_groups
    from acclimate.optim.update_strength import MismatchCallback, snapshot, update_report

_WHERE = {
    "MismatchCallback": "update_strength",
    "Muon": "muon",
    "MuonFactory": "muon",
    "build_muon": "muon",
    "muon_param_groups": "muon_routing",
    "snapshot": "update_strength",
    "update_report": "update_strength",
}

__all__ = [
    "MismatchCallback",
    "Muon",
    "MuonFactory",
    "build_muon",
    "muon_param_groups",
    "snapshot",
    "update_report",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'acclimate.optim' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"acclimate.optim.{_WHERE[name]}"), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value
