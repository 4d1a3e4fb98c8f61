"""The result of one rule on one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.metrics.payload_contract import non_finite_word

RuleVerdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True)
class Evidence:
    """Some steps of one key, and its values there."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: NaN and infinities become words."""
        values = [value if math.isfinite(value) else non_finite_word(value) for value in self.values]
        return {"key": self.key, "steps": list(self.steps), "values": values}


@dataclass(frozen=True)
class Knob:
    """A config key to change: its current value (None: unknown) and a value to try."""

    key: str
    current: Any
    suggested: Any

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    def __str__(self) -> str:
        now = f" (now {self.current})" if self.current is not None else ""
        return f"{self.key} = {self.suggested}{now}"


@dataclass(frozen=True)
class Outcome:
    """What a rule says of a run.

    Attributes:
        verdict: `healthy`; `finding`; `explained`: the symptom is present, but another rule reports its cause;
            `not_measured`: the run lacks the keys, or has too few steps.
        sentence: what was measured.
        evidence: the steps to look at, at most `MAX_EVIDENCE` per key.
        knob: the setting to change, for findings.
        severity: overrides the severity of the rule.
    """

    verdict: RuleVerdict
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    knob: Knob | None = None
    severity: Severity | None = None


def healthy(sentence: str) -> Outcome:
    """Measured and within bounds."""
    return Outcome("healthy", sentence)


def explained(sentence: str) -> Outcome:
    """The symptom is present, but another rule reports its cause."""
    return Outcome("explained", sentence)


def not_measured(reason: str) -> Outcome:
    """The run lacks the keys, has too few steps, or the rule does not apply to it."""
    return Outcome("not_measured", reason)


def finding(
    sentence: str, *, evidence: Iterable[Evidence], knob: Knob | None = None, severity: Severity | None = None
) -> Outcome:
    """A fault."""
    return Outcome("finding", sentence, tuple(evidence), knob, severity)
