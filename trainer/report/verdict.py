"""What a diagnosis found, as plain data: the report draws it and does not judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True)
class Remark:
    """One thing that was found.

    Attributes:
        rule: the name of the rule that found it.
        severity: `advice` costs time or tokens and leaves a run healthy.
        text: what was seen, with numbers.
        setting: the knob with a suggested value (`ledger.capacity = 512`); may be empty.
        steps: the steps that are the evidence.
    """

    rule: str
    severity: Severity
    text: str
    setting: str = ""
    steps: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The rule's name as words."""
        return self.rule.replace("_", " ").capitalize()


@dataclass(frozen=True)
class Check:
    """One rule that was looked at: its name, what it came to, when it fires and why there, and what it saw."""

    rule: str
    result: str
    threshold: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What was found in one run, the gravest first, and all that was checked."""

    remarks: tuple[Remark, ...]
    checks: tuple[Check, ...] = ()

    @property
    def findings(self) -> tuple[Remark, ...]:
        """Errors and warnings."""
        return tuple(remark for remark in self.remarks if remark.severity != "advice")

    @property
    def sentence(self) -> str:
        """`Healthy`, or how many findings; advice is counted beside."""
        if not self.checks:
            return "Not diagnosed"
        num_findings, num_advice = len(self.findings), len(self.remarks) - len(self.findings)
        words = f"{num_findings} finding{'s' if num_findings > 1 else ''}" if num_findings else "Healthy: no findings"
        advice = f", {num_advice} piece{'s' if num_advice > 1 else ''} of advice" if num_advice else ""
        return words + advice
