"""A result that grows in a hidden directory beside its place, so that a kill costs little and leaves nothing half-written there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from acclimate.errors import InputError
from acclimate.runs import PARTIAL, acquire, remove, replacing


class Syncs(Protocol):
    """A file, or several, whose tensors can be waited for until they are on the disk."""

    def sync(self) -> None: ...


JOURNAL_SECONDS = 2.0  # so much work a kill can cost, at most


def check_place(out: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Raises InputError when `out` is or holds one of the inputs, or is something that may not be replaced."""
    for path in inputs:
        if path.exists() and (out.resolve() == path.resolve() or out.resolve() in path.resolve().parents):
            raise InputError(f"'{out}' is, or holds, the input '{path}'. Choose another place with -o")
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise InputError(f"'{out}' exists. Choose another place with -o, or replace it with --overwrite")


class Unfinished:
    """The hidden directory beside `out`, and its journal; one process at a time owns it, until the end of a `with` block.

    An InputError or ValueError there throws the directory away: other inputs are needed, so this part of a result is of no use.

    The journal's first line is the fingerprint of inputs and settings; each other line tells of a batch whose tensors are on disk.
    Lines are written after the tensors have been flushed, every JOURNAL_SECONDS. When the fingerprint is another one (or None),
    what is there is thrown away.
    """

    def __init__(self, out: Path, fingerprint: dict[str, Any] | None) -> None:
        self.path = out.parent / f"{PARTIAL}{out.name}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock: int | None = acquire(self.path)
        self.journal = self.path / "journal.jsonl"
        self.done: dict[int, list[dict[str, Any]]] = {}
        self.rank: int | None = None
        self.waiting: list[str] = []
        self.flushed = time.monotonic()
        first, *lines = self._lines() or [None]
        if fingerprint is not None and first == fingerprint:
            for line in lines:
                if "rank" in line:
                    self.rank = line["rank"]
                else:
                    self.done[line["batch"]] = line["rows"]
            return
        for file in self.path.iterdir():
            if file.name != ".lock":
                remove(file)
        self._append([json.dumps(fingerprint)])

    def _lines(self) -> list[Any]:
        if not self.journal.exists():
            return []
        whole = self.journal.read_text(encoding="utf-8").split("\n")[:-1]  # a line that a kill cut off has no end
        return [json.loads(line) for line in whole]

    def _append(self, lines: list[str]) -> None:
        with self.journal.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def record_rank(self, rank: int) -> None:
        """Note the rank that was found from the data."""
        self.rank = rank
        self._append([json.dumps({"rank": rank})])

    def record(self, batch: int, rows: list[dict[str, Any]], file: Syncs) -> None:
        """Note that a batch's tensors have been written to `file`."""
        self.done[batch] = rows
        self.waiting.append(json.dumps({"batch": batch, "rows": rows}))
        if time.monotonic() - self.flushed >= JOURNAL_SECONDS:
            file.sync()
            self._append(self.waiting)
            self.waiting, self.flushed = [], time.monotonic()

    def finish(self, out: Path) -> None:
        """Move the result, which is complete, to its place."""
        self.journal.unlink()
        (self.path / ".lock").unlink()
        with replacing(out) as temporary:
            os.replace(self.path, temporary)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, InputError | ValueError):
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let other processes have the directory."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
