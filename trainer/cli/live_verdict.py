"""The verdict beside the progress bar: what `train diagnose` says of the numbers so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.diagnostics.diagnose import diagnose
from trainer.errors import UserError
from trainer.runs.load import load_run

LEAST_SEC_BETWEEN = 20.0
MOST_SHARE = 0.005  # of the run's time


class LiveVerdict:
    """Reads the run's record again from time to time: at most `MOST_SHARE` of the time goes into it."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir
        self._clock = clock
        self._next = clock() + LEAST_SEC_BETWEEN
        self._verdict = ""

    def __call__(self) -> str:
        """`healthy`, the names of the findings, or nothing as long as it is too early to say."""
        started = self._clock()
        if started >= self._next:
            try:
                findings = diagnose(load_run(self._path)).findings
            except UserError:  # no row yet
                findings = None
            if findings is not None:
                self._verdict = ", ".join(ruling.rule.name for ruling in findings) or "healthy"
            took = self._clock() - started
            self._next = started + max(LEAST_SEC_BETWEEN, took / MOST_SHARE)
        return self._verdict
