"""The progress bar, on stderr and only where that is a terminal; stdout belongs to the payload."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from trainer.metrics.best_effort import BestEffort


class Progress:
    """A bar with steps, or tokens where they are the run's length, and loss, time left and verdict; nothing at all where
    `is_shown` is false.

    rich must own neither stream: by default it takes stdout, and payload lines with it.

    Args:
        verdict: gives a word or two on the run's health so far; its failure takes the verdict off the bar.
    """

    def __init__(
        self,
        *,
        is_shown: bool,
        total: int,
        done: int,
        name: str,
        verdict: Callable[[], str] | None = None,
    ) -> None:
        self._bar: Any = None
        self._verdict = verdict or (lambda: "")
        self._guard = BestEffort("verdict")
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
            TextColumn("{task.fields[verdict]}", markup=False),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, loss="-", verdict="")
        self._bar.start()

    def update(self, reached: int, loss: float) -> None:
        """Show so much of the run as done."""
        if self._bar is not None:
            verdict = self._guard.run(self._verdict) or ""
            self._bar.update(self._task, completed=reached, loss=f"{loss:.4f}", verdict=verdict, refresh=True)

    def hide(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()

    def show(self) -> None:
        """Put the bar back on the screen."""
        if self._bar is not None:
            self._bar.start()
