"""A rule: one pure function of a run, and what a reader should know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.diagnostics.outcome import Outcome, Severity
from trainer.runs.load import Run


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        name: stable; programs and the smoke matrix go by it.
        looks_at: the keys.
        threshold: when it fires, in words.
        why: where the threshold comes from.
        knob: what to turn.
        severity: of its findings, unless one says otherwise.
        check: the function.
    """

    name: str
    looks_at: tuple[str, ...]
    threshold: str
    why: str
    knob: str
    severity: Severity
    check: Callable[[Run], Outcome]
