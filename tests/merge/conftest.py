"""Processes that a test can kill or measure."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def processes() -> Callable[..., int | None]:
    """Run a function of `merge.worker` in a process with the libraries imported beforehand; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["merge.worker", "peft"])

    def run(target: Any, *arguments: Any) -> int | None:
        process = context.Process(target=target, args=arguments)
        process.start()
        process.join(120)
        return process.exitcode

    return run
