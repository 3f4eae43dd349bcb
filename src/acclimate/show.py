"""What a person sees while a job runs. The library is silent; the command line passes a `Terminal`."""

from __future__ import annotations

import time
from typing import Any


class Silent:
    """Shows nothing. The interface that the pipeline talks to."""

    def say(self, text: str) -> None:
        """One line about what happens now."""

    def start(self, what: str, total: float, done: float = 0) -> None:
        """Begin a bar of `total` units."""

    def advance(self, count: float) -> None:
        """`count` more units are done."""

    def note(self, text: str) -> None:
        """A few words beside the bar, such as the loss."""

    def stop(self) -> None:
        """The bar is finished."""


class Terminal(Silent):
    """Rich progress bars with remaining time on stderr, so that stdout stays free for results.

    Where stderr is a file, a line at every tenth of the way takes the place of the bar.
    """

    def __init__(self, console: Any) -> None:
        self.console = console
        self.progress: Any = None
        self.plain: _Tenths | None = None

    def say(self, text: str) -> None:
        self.stop()
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def start(self, what: str, total: float, done: float = 0) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.stop()
        if not self.console.is_terminal:
            self.plain = _Tenths(what, total, done)
            return
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
        )
        self.bar = self.progress.add_task(what, total=total, completed=done, note="")
        self.progress.start()

    def advance(self, count: float) -> None:
        if self.progress is not None:
            self.progress.advance(self.bar, count)
        elif self.plain is not None and self.plain.advance(count):
            self.console.print(self.plain.line(), highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        if self.progress is not None:
            self.progress.update(self.bar, note=text)
        elif self.plain is not None:
            self.plain.note = text

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.progress = self.plain = None


class _Tenths:
    """Progress for a log file: says when another tenth is done."""

    def __init__(self, what: str, total: float, done: float) -> None:
        self.what, self.total, self.done, self.note = what, total, done, ""
        self.began, self.before = time.perf_counter(), done

    def advance(self, count: float) -> bool:
        tenth = int(10 * self.done / self.total)
        self.done += count
        return int(10 * self.done / self.total) > tenth

    def line(self) -> str:
        spent = time.perf_counter() - self.began
        left = spent * max(0.0, self.total - self.done) / max(self.done - self.before, 1e-9)
        return f"{self.what}: {self.done:.0f}/{self.total:.0f}, {spent:.0f} s, eta {left:.0f} s  {self.note}".rstrip()
