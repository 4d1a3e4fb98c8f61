"""Diagnosis: all rules over one run, and the answer as strict JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainer.diagnostics.outcome import Outcome, Severity
from trainer.diagnostics.rules.all_rules import RULES
from trainer.diagnostics.rules.rule import Rule
from trainer.runs.load import Run

DIAGNOSIS_VERSION: Final = 1
ADVICE: Final = "advice"


@dataclass(frozen=True)
class Ruling:
    """A rule and what it said."""

    rule: Rule
    outcome: Outcome

    @property
    def severity(self) -> Severity | None:
        """Of a finding; None otherwise."""
        return (self.outcome.severity or self.rule.severity) if self.outcome.verdict == "finding" else None

    def to_json(self) -> dict[str, Any]:
        """As strict JSON."""
        outcome = self.outcome
        return {
            "rule": self.rule.name,
            "verdict": outcome.verdict,
            "severity": self.severity,
            "sentence": outcome.sentence,
            "evidence": [evidence.to_json() for evidence in outcome.evidence],
            "knob": outcome.knob.to_json() if outcome.knob is not None else None,
        }


@dataclass(frozen=True)
class Diagnosis:
    """What all rules said of one run."""

    run: Run
    rulings: tuple[Ruling, ...]

    @property
    def findings(self) -> list[Ruling]:
        """Errors and warnings: what makes a run not healthy."""
        return [ruling for ruling in self.rulings if ruling.severity in ("error", "warning")]

    @property
    def advice(self) -> list[Ruling]:
        """Findings that cost time or tokens, and do no harm."""
        return [ruling for ruling in self.rulings if ruling.severity == ADVICE]

    @property
    def is_healthy(self) -> bool:
        """Nothing found but advice."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Version 1 of the answer for programs; later versions only add keys, or count up."""
        steps = self.run.steps
        return {
            "diagnosis_version": DIAGNOSIS_VERSION,
            "run": str(self.run.path),
            "verdict": "healthy" if self.is_healthy else "findings",
            "steps": [steps[0], steps[-1]] if steps else None,
            "num_rows": len(steps),
            "findings": [ruling.rule.name for ruling in self.findings],
            "advice": [ruling.rule.name for ruling in self.advice],
            "rules": [ruling.to_json() for ruling in self.rulings],
            "notes": self.run.notes,
        }


def diagnose(run: Run, rules: Iterable[Rule] = RULES) -> Diagnosis:
    """Ask every rule."""
    return Diagnosis(run, tuple(Ruling(rule, rule.check(run)) for rule in rules))
