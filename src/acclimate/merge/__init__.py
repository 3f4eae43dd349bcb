"""After training: many adapters into one, and one checkpoint made robust.

The public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazily

if TYPE_CHECKING:
    from acclimate.merge.adapters import compare_bases, merge_adapters
    from acclimate.merge.circumerge import MergeSettings
    from acclimate.merge.in_model import add_weighted_adapter
    from acclimate.merge.monosoup import SoupReport, SoupSettings, monosoup_
    from acclimate.merge.plan import plan_merge
    from acclimate.merge.report import MergeReport
    from acclimate.merge.soup_files import monosoup_adapter, monosoup_checkpoint

_WHERE = {
    "MergeReport": "report",
    "MergeSettings": "circumerge",
    "SoupReport": "monosoup",
    "SoupSettings": "monosoup",
    "add_weighted_adapter": "in_model",
    "compare_bases": "adapters",
    "merge_adapters": "adapters",
    "monosoup_": "monosoup",
    "monosoup_adapter": "soup_files",
    "monosoup_checkpoint": "soup_files",
    "plan_merge": "plan",
}

__all__ = [
    "MergeReport",
    "MergeSettings",
    "SoupReport",
    "SoupSettings",
    "add_weighted_adapter",
    "compare_bases",
    "merge_adapters",
    "monosoup_",
    "monosoup_adapter",
    "monosoup_checkpoint",
    "plan_merge",
]

__getattr__ = lazily(__name__, _WHERE)
