"""Diagnosis: the outcomes of all rules on one run, and their JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainer.diagnostics.outcome import Outcome, Severity
from trainer.diagnostics.rules.all_rules import RULES
from trainer.diagnostics.rules.rule import Rule
from trainer.runs.load import RunRecord
from trainer.wording import counted

DIAGNOSIS_VERSION: Final = 1
SEVERITIES: Final = ("error", "warning", "advice")


@dataclass(frozen=True)
class Ruling:
    """A rule and its outcome on a run."""

    rule: Rule
    outcome: Outcome

    @property
    def severity(self) -> Severity | None:
        """The severity of a finding; None for other verdicts."""
        return (self.outcome.severity or self.rule.severity) if self.outcome.verdict == "finding" else None

    @property
    def result(self) -> str:
        """The severity of a finding, the verdict otherwise."""
        return self.severity or self.outcome.verdict.replace("_", " ")

    @property
    def title(self) -> str:
        """The name of the rule for readers: `Batch size`."""
        return self.rule.name.replace("_", " ").capitalize()

    @property
    def steps(self) -> list[int]:
        """The steps of all evidence, ascending."""
        return sorted({step for evidence in self.outcome.evidence for step in evidence.steps})

    def to_json(self) -> dict[str, Any]:
        """Strict JSON."""
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
    """The rulings on one run."""

    run: RunRecord
    rulings: tuple[Ruling, ...]

    @property
    def findings(self) -> list[Ruling]:
        """Errors and warnings: a run with any is not healthy."""
        return [ruling for ruling in self.rulings if ruling.severity in ("error", "warning")]

    @property
    def advice(self) -> list[Ruling]:
        """Findings that cost time or tokens but do not harm the model."""
        return [ruling for ruling in self.rulings if ruling.severity == "advice"]

    @property
    def by_severity(self) -> list[Ruling]:
        """Errors, warnings and advice, in this order."""
        return [ruling for severity in SEVERITIES for ruling in self.rulings if ruling.severity == severity]

    @property
    def is_healthy(self) -> bool:
        """Whether there are no errors and no warnings."""
        return not self.findings

    @property
    def verdict(self) -> Literal["healthy", "findings"] | None:
        """None for a run without training rows: the rules have nothing to check, so it cannot be called healthy."""
        if not self.run.steps:
            return None
        return "healthy" if self.is_healthy else "findings"

    @property
    def summary(self) -> str:
        """One line: `Healthy: no findings`, or the number of findings; and the number of suggestions (advice)."""
        if self.verdict is None:
            return "Not diagnosed: no training rows"
        found = counted(len(self.findings), "finding") if self.findings else "Healthy: no findings"
        return f"{found}, {counted(len(self.advice), 'suggestion')}" if self.advice else found

    def to_json(self) -> dict[str, Any]:
        """Version 1 of the JSON; later versions only add keys or increase the version."""
        steps = self.run.steps
        return {
            "diagnosis_version": DIAGNOSIS_VERSION,
            "run": str(self.run.path),
            "verdict": self.verdict,
            "steps": [steps[0], steps[-1]] if steps else None,
            "num_rows": len(steps),
            "findings": [ruling.rule.name for ruling in self.findings],
            "advice": [ruling.rule.name for ruling in self.advice],
            "rules": [ruling.to_json() for ruling in self.rulings],
            "notes": self.run.notes,
        }


def diagnose(run: RunRecord, rules: Iterable[Rule] = RULES) -> Diagnosis:
    """Apply every rule."""
    return Diagnosis(run, tuple(Ruling(rule, rule.apply(run)) for rule in rules))
