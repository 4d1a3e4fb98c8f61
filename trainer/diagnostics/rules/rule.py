"""The type of a diagnosis rule: a pure function of a run record, and its documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.diagnostics.outcome import Outcome, Severity
from trainer.runs.load import RunRecord


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        name: stable id, used in JSON and in the smoke matrix.
        keys: metric keys that the rule reads.
        threshold: the condition for a finding, in words.
        why: the reason for the threshold.
        knob: what to change.
        severity: of a finding, unless its `Outcome` has another.
        check: the rule itself.
    """

    name: str
    keys: tuple[str, ...]
    threshold: str
    why: str
    knob: str
    severity: Severity
    check: Callable[[RunRecord], Outcome]
