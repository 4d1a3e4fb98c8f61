"""The bar of a run on a terminal, by rich: step, loss, tokens per second, time left.

It stands below the lines of the log and of stdout, and is gone when the run ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.training.extension import Extension, RunView, Step
from trainer.wording import decimals_text


class _Terminal(Console):
    """stderr, whose cursor stays visible: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class ProgressBar(Extension):
    """The bar, on rank 0."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        # The width is left to the terminal: wrapped by rich, a command could not be copied.
        console = _Terminal(stderr=True, soft_wrap=True)
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[numbers]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, refresh_per_second=4)
        self._task = self._bar.add_task("", total=run.plan.facts.steps, completed=run.first_step, numbers="")
        self._tokens = self._bar.add_task("", total=None, visible=False, numbers="")  # for their speed

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        """Show a step. The first also begins the bar: what comes before has lines of its own."""
        self._bar.advance(self._tokens, step.outcome.tokens)
        numbers, speed = f"loss {decimals_text(step.outcome.loss)}", self._bar.tasks[self._tokens].speed
        if speed is not None:
            numbers += f", {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step.number, numbers=numbers)
        self._bar.start()

    def closed(self) -> None:
        """Remove it."""
        self._bar.stop()
