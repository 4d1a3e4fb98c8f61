"""What diagnosis says of a run, in the forms that verbs and the progress bar show."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.runs.load import RunRecord, load_run

MIN_INTERVAL_SEC = 20.0
MAX_TIME_SHARE = 0.005


def verdict_text(run: RunRecord) -> str:
    """A few words; see `Diagnosis.brief`."""
    return diagnose(run).brief


class LiveVerdict:
    """The verdict beside the progress bar: reads the run's record again, in at most `MAX_TIME_SHARE` of the run's time."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir
        self._clock = clock
        self._next = clock() + MIN_INTERVAL_SEC
        self._text = ""

    def __call__(self) -> str:
        """A few words on the run so far, or nothing before the first logged row."""
        started = self._clock()
        if started >= self._next:
            with suppress(UserError):  # no row yet
                self._text = verdict_text(load_run(self._path))
            took = self._clock() - started
            self._next = started + max(MIN_INTERVAL_SEC, took / MAX_TIME_SHARE)
        return self._text
