"""Diagnosis: the outcomes of all rules on one run, and their JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainer.tools import limits
from trainer.tools.diagnostics import mixing, run, state, training
from trainer.tools.diagnostics.rule import Outcome, Rule, Severity, not_measured
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, error_text

DIAGNOSIS_VERSION: Final = 2
DiagnosisVerdict = Literal["healthy", "no_findings", "findings"]

RULES: Final[tuple[Rule, ...]] = (
    *state.RULES, run.model_contract, *mixing.RULES, *training.RULES,
    *run.SPEED_RULES, run.restarts, run.ending,
)  # fmt: skip
"""All rules, in display order."""


@dataclass(frozen=True)
class Ruling:
    """A rule and its outcome on a run."""

    rule: Rule
    outcome: Outcome

    @property
    def is_judged(self) -> bool:
        """Whether the run had enough for the rule to judge."""
        return self.outcome.verdict != "not_measured"

    @property
    def fix(self) -> str:
        """What to try: see `Knob`; empty if unknown."""
        knob = self.outcome.knob
        return f"try {knob}" if knob else ""

    @property
    def severity(self) -> Severity | None:
        """The severity of a finding; None for other verdicts."""
        if self.outcome.verdict != "finding":
            return None
        return self.outcome.severity or self.rule.severity

    @property
    def result(self) -> str:
        """The severity of a finding, else the verdict; `not yet` if more rows would give one."""
        if self.outcome.is_early:
            return "not yet"
        return self.severity or self.outcome.verdict.replace("_", " ")

    @property
    def steps(self) -> list[int]:
        """The steps of all evidence, ascending."""
        return sorted({step for evidence in self.outcome.evidence for step in evidence.steps})

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule.name,
            "verdict": self.outcome.verdict,
            "severity": self.severity,
            "not_yet": self.outcome.is_early,
            "sentence": self.outcome.sentence,
            "evidence": [evidence.to_json() for evidence in self.outcome.evidence],
            "knob": self.outcome.knob and vars(self.outcome.knob),
            "fix": self.fix,
            "needs": list(self.rule.needs),
        }


@dataclass(frozen=True)
class Diagnosis:
    run: RunRecord
    rulings: tuple[Ruling, ...]

    @property
    def findings(self) -> list[Ruling]:
        """Errors, then warnings: a run with any is not healthy."""
        found = [ruling for ruling in self.rulings if ruling.severity in ("error", "warning")]
        return sorted(found, key=lambda ruling: str(ruling.severity))

    @property
    def advice(self) -> list[Ruling]:
        """Findings that cost time or tokens but do not harm the model."""
        return [ruling for ruling in self.rulings if ruling.severity == "advice"]

    @property
    def num_judged(self) -> int:
        """The number of rules that the run had enough for."""
        return sum(ruling.is_judged for ruling in self.rulings)

    @property
    def verdict(self) -> DiagnosisVerdict | None:
        """`healthy` takes half of the rules or more (`LEAST_JUDGED`), else `no_findings`.

        None for a run without training rows in which no error and no warning was found.
        """
        if self.findings:
            return "findings"
        if not self.run.steps:
            return None
        if self.num_judged < limits.LEAST_JUDGED * len(self.rulings):
            return "no_findings"
        return "healthy"

    @property
    def coverage(self) -> str:
        """How many rules judged: `14 of 24 rules judged the run, 4 could not yet, ...`."""
        early = sum(ruling.outcome.is_early for ruling in self.rulings)
        rest = {"could not yet": early, "had nothing to measure": len(self.rulings) - self.num_judged - early}
        parts = [f"{self.num_judged} of {len(self.rulings)} rules judged the run"]
        return ", ".join([*parts, *(f"{number} {what}" for what, number in rest.items() if number)])

    @property
    def brief(self) -> str:
        """A few words: the names of the findings, `healthy`, that little could be checked, or why the
        run ended before its first row."""
        state, step, reason = map(self.run.status.get, ("state", "last_step", "reason"))
        if not self.run.steps and state in ("failed", "died"):
            return f"{state} at step {step or 0:,}: {reason or 'no reason is recorded'}"
        return {
            None: "no training rows",
            "findings": f"{counted(len(self.findings), 'finding')}: {', '.join(each.rule.name for each in self.findings)}",
            "no_findings": "nothing wrong in what was measured",
            "healthy": "healthy",
        }[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Version 2 of the JSON; later versions only add keys or increase the version."""
        steps, status = self.run.steps, self.run.status
        return {
            "diagnosis_version": DIAGNOSIS_VERSION,
            "run": str(self.run.path),
            "state": status.get("state"),
            "reason": status.get("reason") or None,
            "verdict": self.verdict,
            "steps": [steps[0], steps[-1]] if steps else None,
            "num_rows": len(steps),
            "findings": [ruling.rule.name for ruling in self.findings],
            "advice": [ruling.rule.name for ruling in self.advice],
            "rules_judged": self.num_judged,
            "rules_not_judged": [each.rule.name for each in self.rulings if not each.is_judged],
            "rules": [ruling.to_json() for ruling in self.rulings],
            "notes": self.run.notes,
        }


def diagnose(run: RunRecord, rules: Iterable[Rule] = RULES) -> Diagnosis:
    rulings = []
    for rule in rules:
        try:
            rulings.append(Ruling(rule, rule.apply(run)))
        except Exception as error:  # noqa: BLE001 - files that hold anything are no reason not to judge the rest
            why = f"the run's files do not fit together ({error_text(error)})"
            rulings.append(Ruling(rule, not_measured(why)))
    return Diagnosis(run, tuple(rulings))
