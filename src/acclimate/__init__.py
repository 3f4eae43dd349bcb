"""Adapt models you already have to the task you face, and prove on your data whether it helped.

    from acclimate import tune, evaluate, compare, Recipe, load_model

The public names are imported when they are first used: `import acclimate` itself loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazily

if TYPE_CHECKING:
    from acclimate.comparison import compare
    from acclimate.errors import AcclimateError, InputError, MissingError
    from acclimate.models import load_model
    from acclimate.pipeline import tune
    from acclimate.prepare import load_run
    from acclimate.recipe import Recipe
    from acclimate.runs import Run
    from acclimate.use import evaluate, export, predict

__version__ = "0.1.0"

_WHERE = {
    "AcclimateError": "errors",
    "InputError": "errors",
    "MissingError": "errors",
    "Recipe": "recipe",
    "Run": "runs",
    "compare": "comparison",
    "evaluate": "use",
    "export": "use",
    "load_model": "models",
    "load_run": "prepare",
    "predict": "use",
    "tune": "pipeline",
}

__all__ = [
    "AcclimateError",
    "InputError",
    "MissingError",
    "Recipe",
    "Run",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "load_model",
    "load_run",
    "predict",
    "tune",
]

__getattr__ = lazily(__name__, _WHERE)
