"""After training: many adapters into one.

The public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate.merge.adapters import compare_bases, merge_adapters
    from acclimate.merge.circumerge import MergeSettings
    from acclimate.merge.in_model import add_weighted_adapter
    from acclimate.merge.plan import plan_merge
    from acclimate.merge.report import MergeReport

_WHERE = {
    "MergeReport": "report",
    "MergeSettings": "circumerge",
    "add_weighted_adapter": "in_model",
    "compare_bases": "adapters",
    "merge_adapters": "adapters",
    "plan_merge": "plan",
}

__all__ = [
    "MergeReport",
    "MergeSettings",
    "add_weighted_adapter",
    "compare_bases",
    "merge_adapters",
    "plan_merge",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'acclimate.merge' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"acclimate.merge.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
