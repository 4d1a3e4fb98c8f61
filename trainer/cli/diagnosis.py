"""What diagnosis says of a run, in the forms that verbs and the progress bar show."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.diagnostics.diagnose import Ruling, diagnose
from trainer.errors import UserError
from trainer.report.verdict import Check, Remark, Verdict
from trainer.runs.load import Run, load_run

_BY_SEVERITY = ("error", "warning", "advice")
MIN_INTERVAL_SEC = 20.0
MAX_TIME_SHARE = 0.005


def verdict_text(run: Run) -> str:
    """`healthy`, or the names of the findings."""
    return ", ".join(ruling.rule.name for ruling in diagnose(run).findings) or "healthy"


def report_verdict(run: Run) -> Verdict:
    """The diagnosis as plain data: `report` and `diagnostics` do not import each other."""
    if not len(run.steps):  # no rule could look at anything, so the run cannot be called healthy
        return Verdict((), ())
    diagnosis = diagnose(run)
    remarks = [_remark(ruling) for ruling in [*diagnosis.findings, *diagnosis.advice]]
    remarks.sort(key=lambda remark: _BY_SEVERITY.index(remark.severity))
    return Verdict(tuple(remarks), tuple(_check(ruling) for ruling in diagnosis.rulings))


def _remark(ruling: Ruling) -> Remark:
    severity, outcome = ruling.severity, ruling.outcome
    assert severity is not None
    steps = sorted({step for evidence in outcome.evidence for step in evidence.steps})
    knob = str(outcome.knob) if outcome.knob is not None else ""
    return Remark(ruling.rule.name, severity, outcome.sentence, knob, tuple(steps))


def _check(ruling: Ruling) -> Check:
    result = ruling.severity or ruling.outcome.verdict.replace("_", " ")
    return Check(ruling.rule.name, result, f"{ruling.rule.threshold} ({ruling.rule.why})", ruling.outcome.sentence)


class LiveVerdict:
    """The verdict beside the progress bar: reads the run's record again, in at most `MAX_TIME_SHARE` of the run's time."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir
        self._clock = clock
        self._next = clock() + MIN_INTERVAL_SEC
        self._text = ""

    def __call__(self) -> str:
        """`healthy`, the names of the findings, or nothing before the first logged row."""
        started = self._clock()
        if started >= self._next:
            with suppress(UserError):  # no row yet
                self._text = verdict_text(load_run(self._path))
            took = self._clock() - started
            self._next = started + max(MIN_INTERVAL_SEC, took / MAX_TIME_SHARE)
        return self._text
