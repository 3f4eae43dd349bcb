"""The four jobs a model can be tuned for, each one module with one class: `sft`, `classify`, `choice`, `dpo`."""

from __future__ import annotations

import importlib

from acclimate.tasks.base import Task

TASKS = ("sft", "classify", "choice", "dpo")


def get_task(name: str) -> Task:
    """The task object by name; the module (and with it transformers or TRL) is imported only now."""
    return importlib.import_module(f"acclimate.tasks.{name}").TASK
