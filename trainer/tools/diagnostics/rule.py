"""A diagnosis rule, and its outcome on a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from trainer.tools import limits
from trainer.tools.diagnostics.facts import Evidence, Knob
from trainer.tools.runs.load import RunRecord
from trainer.wording import listed

RuleVerdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True)
class Outcome:
    """The result of a rule on a run; the functions below make one for each verdict."""

    verdict: RuleVerdict
    sentence: str  # what was measured
    evidence: tuple[Evidence, ...] = ()  # the steps to look at
    knob: Knob | None = None  # the setting to change, for findings
    severity: Severity | None = None  # instead of that of the rule
    is_early: bool = False  # not measured because there are too few rows or steps so far


def healthy(sentence: str) -> Outcome:
    """Measured and within bounds."""
    return Outcome("healthy", sentence)


def explained(sentence: str) -> Outcome:
    """The symptom is present, but another rule reports its cause."""
    return Outcome("explained", sentence)


def not_measured(reason: str) -> Outcome:
    """The run lacks the keys, or the rule does not apply; see `not_yet` for a short run."""
    return Outcome("not_measured", reason)


def not_yet(reason: str) -> Outcome:
    """Not measured, because the run has too few rows or steps so far."""
    return Outcome("not_measured", reason, is_early=True)


def finding(sentence: str, *evidence: Evidence, knob: Knob | None = None, severity: Severity | None = None) -> Outcome:
    return Outcome("finding", sentence, evidence, knob, severity)


def unlogged(keys: Sequence[str], hint: str = "") -> Outcome:
    """The outcome for a run without some keys. `hint`: what makes a run log them."""
    return not_measured("; ".join(filter(None, (f"needs {listed(keys)}", hint))))


@cache
def _sections() -> dict[str, str]:
    """The text of each rule by its name, from rules.md."""
    text = (resources.files("trainer.tools.diagnostics") / "rules.md").read_text(encoding="utf-8")
    parts = [section.partition("\n") for section in text.split("\n## ")[1:]]
    return {name: body for name, _, body in parts}


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules; see `rule`."""

    name: str
    severity: Severity  # of a finding, unless its `Outcome` has another
    check: Callable[[RunRecord], Outcome]  # for a run that has all keys in `needs`
    needs: tuple[str, ...]
    uses: tuple[str, ...]  # other keys and files that it reads if they are there
    hint: str  # what makes a run log the needed keys

    @property
    def texts(self) -> list[str]:
        """The condition for a finding, the reason for the threshold, and what to change."""
        text = _sections()[self.name].format(limits=limits).strip()
        condition, *others = (" ".join(part.split()) for part in re.split(r"\n\n|\nChange: ", text))
        return [condition.rstrip("."), *others]

    def apply(self, run: RunRecord) -> Outcome:
        missing = [key for key in self.needs if not run.column(key)[0]]
        if missing:
            return unlogged(missing, self.hint)
        return self.check(run)


def rule(
    severity: Severity, *, needs: Iterable[str] = (), uses: Iterable[str] = (), hint: str = ""
) -> Callable[[Callable[[RunRecord], Outcome]], Rule]:
    """Make a rule of a pure function of a run's record, by the function's name; see `Rule`.

    Its section in rules.md, shown in docs/diagnosis.md, says when, why, and what to change.
    """
    return lambda check: Rule(check.__name__, severity, check, tuple(needs), tuple(uses), hint)
