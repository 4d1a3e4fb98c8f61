"""Progress of something long: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.wording import printable

SECONDS_PER_LINE = 30.0
Report = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def silent(done: int, total: int, what: str) -> None:
    """Says nothing."""


@contextmanager
def progress_bar(otherwise: Report = silent) -> Iterator[Report]:
    """A bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield otherwise
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=sys.stderr), redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("reading")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=escape(printable(what))
        )


def now_and_then(say: Callable[[str], object]) -> Report:
    """Hands `say` a line of progress every half minute, of megabytes."""
    said = time.perf_counter()

    def report(done: int, total: int, what: str) -> None:
        nonlocal said
        if time.perf_counter() - said >= SECONDS_PER_LINE:
            said = time.perf_counter()
            say(f"{done:,} of {total:,} MB: {what}")

    return report
