"""The type of a diagnosis rule: a pure function of a run record, and its documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.diagnostics.outcome import Outcome, Severity, not_measured
from trainer.runs.load import RunRecord


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        name: stable id, used in JSON and in the smoke matrix.
        needs: metric keys without which nothing can be measured.
        hint: what makes a run log them.
        uses: other keys and files that the rule reads if they are there.
        threshold: the condition for a finding, in words.
        why: the reason for the threshold.
        knob: what to change.
        severity: of a finding, unless its `Outcome` has another.
        check: the outcome for a run that has all keys in `needs`.
    """

    name: str
    needs: tuple[str, ...] = ()
    hint: str = ""
    uses: tuple[str, ...] = ()
    threshold: str
    why: str
    knob: str
    severity: Severity
    check: Callable[[RunRecord], Outcome]

    def apply(self, run: RunRecord) -> Outcome:
        """The outcome for any run."""
        missing = [key for key in self.needs if not run.column(key)[0]]
        if not missing:
            return self.check(run)
        return not_measured(f"the run does not log {' and '.join(missing)}{f'; {self.hint}' if self.hint else ''}")
