"""What a person sees while a job runs. The library is silent; the command line passes a `Terminal`."""

from __future__ import annotations

from typing import Any


class Silent:
    """Shows nothing. The interface that the pipeline talks to."""

    def say(self, text: str) -> None:
        """One line about what happens now."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Begin a bar of `total` units."""

    def advance(self, count: int) -> None:
        """`count` more units are done."""

    def note(self, text: str) -> None:
        """A few words beside the bar, such as the loss."""

    def stop(self) -> None:
        """The bar is finished."""


class Terminal(Silent):
    """Rich progress bars with remaining time on stderr, so that stdout stays free for results."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.progress: Any = None

    def say(self, text: str) -> None:
        self.stop()
        self.console.print(text, style="dim", highlight=False, markup=False)

    def start(self, what: str, total: int, done: int = 0) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.stop()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        self.bar = self.progress.add_task(what, total=total, completed=done, note="")
        self.progress.start()

    def advance(self, count: int) -> None:
        if self.progress is not None:
            self.progress.advance(self.bar, count)

    def note(self, text: str) -> None:
        if self.progress is not None:
            self.progress.update(self.bar, note=text)

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
