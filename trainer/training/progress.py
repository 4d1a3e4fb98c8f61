"""The progress bar, on stderr and only where that is a terminal; stdout belongs to the payload."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """A bar with steps, loss and time left; nothing at all where `is_shown` is false.

    rich must own neither stream: by default it takes stdout, and payload lines with it.
    """

    def __init__(self, *, is_shown: bool, total: int, done: int, name: str) -> None:
        self._bar: Any = None
        if not is_shown:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, loss="-")
        self._bar.start()

    def update(self, step: int, loss: float) -> None:
        """Show `step` as done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", refresh=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar off the screen while a line is written there."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        """Take the bar off the screen for good."""
        if self._bar is not None:
            self._bar.stop()
