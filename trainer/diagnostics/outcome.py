"""What a rule says about a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.metrics.payload_contract import non_finite_word

Verdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]
MAX_EVIDENCE = 12


@dataclass(frozen=True)
class Evidence:
    """Steps of one key, and its values there."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """As strict JSON: a value that is no number there is a word."""
        values = [value if math.isfinite(value) else non_finite_word(value) for value in self.values]
        return {"key": self.key, "steps": list(self.steps), "values": values}


@dataclass(frozen=True)
class Knob:
    """What to turn: a key of the config, what it is now (None: unknown) and what to try."""

    key: str
    current: Any
    suggested: Any

    def to_json(self) -> dict[str, Any]:
        """As it stands."""
        return {"key": self.key, "current": self.current, "suggested": self.suggested}

    def __str__(self) -> str:
        now = f" (now {self.current})" if self.current is not None else ""
        return f"{self.key} = {self.suggested}{now}"


@dataclass(frozen=True)
class Outcome:
    """One rule's answer.

    Attributes:
        verdict: `healthy`; `finding`; `explained`: the symptom is there, and another rule names its cause; `not_measured`:
            the run has not the keys, or too few steps.
        sentence: what was seen, with its numbers.
        evidence: where to look; at most `MAX_EVIDENCE` steps a key.
        knob: what to turn, for findings.
        severity: of a finding; None: the rule's own.
    """

    verdict: Verdict
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    knob: Knob | None = None
    severity: Severity | None = None


def healthy(sentence: str) -> Outcome:
    """Looked at, and as it should be."""
    return Outcome("healthy", sentence)


def explained(sentence: str) -> Outcome:
    """The symptom is there, and another rule's finding is its cause."""
    return Outcome("explained", sentence)


def not_measured(*missing: str) -> Outcome:
    """The run does not have these keys."""
    return Outcome("not_measured", f"the run does not log {' or '.join(missing)}")


def not_applicable(reason: str) -> Outcome:
    """The keys are there, and say nothing about this run."""
    return Outcome("not_measured", reason)


def finding(
    sentence: str, *, evidence: Iterable[Evidence], knob: Knob | None = None, severity: Severity | None = None
) -> Outcome:
    """Something is wrong."""
    return Outcome("finding", sentence, tuple(evidence), knob, severity)
