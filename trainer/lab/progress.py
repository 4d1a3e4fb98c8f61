"""The progress bar, on stderr and only where that is a terminal; stdout belongs to the payload."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.training.run import Run, StepInFlight
    from trainer.training.step.step import StepOutcome


class ProgressBar(Extension):
    """A bar with steps, or tokens if they are the run's length, loss and time left.

    rich must own neither stream: by default it takes stdout, and payload lines with it.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._bar = Progress(
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
        total, done = run.length.total, run.position.reached
        self._task = self._bar.add_task(run.config.run.name, total=total, completed=done, loss="-")
        self._bar.start()

    def step_finished(self, taken: StepInFlight, outcome: StepOutcome) -> None:
        """Show so much of the run as done."""
        self._bar.update(self._task, completed=taken.reached, loss=f"{outcome.loss:.4f}", refresh=True)

    def before_output(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()

    def after_output(self) -> None:
        """Put the bar back on the screen."""
        self._bar.start()

    def closed(self) -> None:
        """Take the bar off the screen for good."""
        self._bar.stop()
