"""What diagnosis says of a run, in the plain form that reports show: the two layers do not know each other."""

from __future__ import annotations

from trainer.diagnostics.diagnose import Ruling, diagnose
from trainer.report.verdict import Check, Remark, Verdict
from trainer.runs.load import Run

_GRAVITY = ("error", "warning", "advice")


def verdict_of(run: Run) -> Verdict:
    """Diagnose the run. Without training rows no rule has anything to look at, and that is not health."""
    if not len(run.steps):
        return Verdict((), ())
    diagnosis = diagnose(run)
    remarks = [_remark(ruling) for ruling in [*diagnosis.findings, *diagnosis.advice]]
    remarks.sort(key=lambda remark: _GRAVITY.index(remark.severity))
    return Verdict(tuple(remarks), tuple(_check(ruling) for ruling in diagnosis.rulings))


def _remark(ruling: Ruling) -> Remark:
    severity, knob = ruling.severity, ruling.outcome.knob
    assert severity is not None
    steps = sorted({step for evidence in ruling.outcome.evidence for step in evidence.steps})
    return Remark(
        ruling.rule.name, severity, ruling.outcome.sentence, str(knob) if knob is not None else "", tuple(steps)
    )


def _check(ruling: Ruling) -> Check:
    result = ruling.severity or ruling.outcome.verdict.replace("_", " ")
    return Check(ruling.rule.name, result, f"{ruling.rule.threshold} ({ruling.rule.why})", ruling.outcome.sentence)
