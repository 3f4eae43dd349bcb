"""Disks that are full or read-only, for real where this process may make them so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(path: Path, size: str = "1m") -> Iterator[bool]:
    """A small file system of its own at `path`; yields whether it could be mounted (that takes root)."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    may = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = may and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", path], check=True)


def write_half(self: Path, text: str, **kwargs: object) -> int:
    """In place of Path.write_text: what a full disk looks like from Python."""
    with self.open("w") as file:
        file.write(text[: len(text) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A place that nobody can write to: root is above permission bits, so it gets a read-only file system."""
    undo: Callable[[], object]
    if os.geteuid() != 0:
        path.chmod(0o500)
        undo = lambda: path.chmod(0o700)  # noqa: E731
    elif subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", path], capture_output=True).returncode == 0:
        undo = lambda: subprocess.run(["umount", "-l", path], check=True)  # noqa: E731
    elif subprocess.run(["chattr", "+i", path], capture_output=True).returncode == 0:
        undo = lambda: subprocess.run(["chattr", "-i", path], check=True)  # noqa: E731
    else:
        pytest.fail("root needs mount or chattr to make a read-only directory")
    try:
        yield
    finally:
        undo()
