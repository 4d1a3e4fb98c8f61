"""The parts of a diagnosis rule: its outcome, and the facts that it reads of a run."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from trainer.tools.runs.load import RunRecord

# explained: the symptom is present, but another rule reports its cause.
RuleVerdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]
MAX_EVIDENCE: Final = 12
MICRO_BATCHES: Final = "train/micro_batches"


@dataclass(frozen=True)
class Series:
    """The logged steps of a key, ascending, and its values there; false if it is not logged."""

    key: str
    steps: array[int]
    values: array[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def total(self) -> float:
        return math.fsum(self.values)

    @property
    def positive(self) -> list[int]:
        """The indices of values above 0."""
        return self.where(lambda value: value > 0)

    def where(self, condition: Callable[[float], bool]) -> list[int]:
        """The indices of values that meet a condition."""
        return [index for index, value in enumerate(self.values) if condition(value)]

    def at(self, indices: Iterable[int]) -> Series:
        chosen = list(indices)
        steps = array("q", map(self.steps.__getitem__, chosen))
        return Series(self.key, steps, array("d", map(self.values.__getitem__, chosen)))

    def since(self, step: int) -> Series:
        return self.at(index for index, logged in enumerate(self.steps) if logged >= step)

    def evidence(self, indices: Sequence[int] | None = None) -> Series:
        """Steps and values at some indices (None: all), evenly spread if there are too many."""
        if indices is None:
            indices = range(len(self))
        count, last = min(len(indices), MAX_EVIDENCE), len(indices) - 1
        return self.at(indices[at * last // max(count - 1, 1)] for at in range(count))

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "steps": self.steps.tolist(), "values": self.values.tolist()}


@dataclass(frozen=True)
class Knob:
    """A setting to change."""

    key: str
    current: Any  # None: unknown
    suggested: Any  # a value to try, or what to change
    in_words: bool = False  # what to change: no value that can be set

    @classmethod
    def scaled(cls, run: RunRecord, key: str, factor: float, otherwise: str) -> Knob:
        """The current value times a factor; if that is unknown or 0, `otherwise`, in words."""
        current = run.setting(key)
        if not isinstance(current, int | float) or not current:
            return cls(key, None, otherwise, in_words=True)
        return cls(key, current, factor * current)

    def __str__(self) -> str:
        """`ledger.capacity = 128 (now 64)`, as in a config; `data.source: more data`."""
        now = f" (now {json.dumps(self.current, default=str)})" * (self.current is not None)
        if self.in_words:
            return f"{self.key}: {self.suggested}{now}"
        return f"{self.key} = {json.dumps(self.suggested)}{now}"


def lower_lr(run: RunRecord, since: int = 2) -> Knob | None:
    """Half the learning rate; None for what began at step 1, before it had changed a weight."""
    return Knob.scaled(run, "optimizer.lr", 0.5, "half of it") if since > 1 else None


@dataclass(frozen=True)
class Outcome:
    """The result of a rule on a run; functions below make those of most verdicts."""

    verdict: RuleVerdict
    sentence: str  # what was measured, or why nothing was
    evidence: tuple[Series, ...] = ()  # the steps to look at
    knob: Knob | None = None  # the setting to change, for findings
    severity: Severity | None = None  # instead of that of the rule
    is_early: bool = False  # not measured because there are too few rows or steps so far


def healthy(sentence: str) -> Outcome:
    """Measured and within bounds."""
    return Outcome("healthy", sentence)


def not_measured(reason: str) -> Outcome:
    """The run lacks the keys, or the rule does not apply; see `not_yet` for a short run."""
    return Outcome("not_measured", reason)


def not_yet(reason: str) -> Outcome:
    """Not measured, because the run has too few rows or steps so far."""
    return Outcome("not_measured", reason, is_early=True)


def finding(sentence: str, *evidence: Series, knob: Knob | None = None, severity: Severity | None = None) -> Outcome:
    return Outcome("finding", sentence, evidence, knob, severity)


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules; see `rule`."""

    name: str
    severity: Severity  # of a finding, unless its `Outcome` has another
    check: Callable[[RunRecord], Outcome]  # for a run that has all keys in `needs`
    needs: tuple[str, ...]
    hint: str  # what makes a run log the needed keys

    def apply(self, run: RunRecord) -> Outcome:
        missing = [key for key in self.needs if not run.column(key)[0]]
        if missing:
            return not_measured("; ".join(filter(None, (f"needs {' and '.join(missing)}", self.hint))))
        outcome = self.check(run)
        last = max((each.steps[-1] for each in outcome.evidence if each), default=0)
        changed = [each.details.get("changed", ()) for each in run.restarts if each.global_step >= last]
        if outcome.knob and any(name.startswith(outcome.knob.key) for names in changed for name in names):
            return replace(outcome, knob=None)  # a resume has changed it since
        return outcome


def rule(
    severity: Severity, *, needs: Sequence[str] = (), hint: str = ""
) -> Callable[[Callable[[RunRecord], Outcome]], Rule]:
    """Make a rule of a pure function of a run's record, by the function's name; see `Rule`.

    Its section in docs/diagnosis.md says when, why, and what to change.
    """
    return lambda check: Rule(check.__name__, severity, check, tuple(needs), hint)


# ---- Facts of a run


def series(run: RunRecord, key: str) -> Series:
    """The values of a key; empty if the run does not log it."""
    return Series(key, *run.column(key))


def aligned(*columns: Series) -> list[Series]:
    """The columns at the steps that all of them have."""
    common = set(columns[0].steps).intersection(*(column.steps for column in columns))
    return [column.at(i for i, step in enumerate(column.steps) if step in common) for column in columns]


def micro_batches(run: RunRecord, since: int = 0) -> int:
    """Micro-batches of a data shard in a step, the fewest since a step; 1 if unknown."""
    setting = run.setting("train.micro_batches")
    if isinstance(setting, int):
        for restart in run.restarts:  # with fewer before
            match restart.global_step >= since and restart.details:
                case {"changed": {"train.micro_batches": {"before": int(before)}}}:
                    setting = min(setting, before)
        return max(setting, 1)
    # A schedule: only the record says what it came to.
    return int(min(series(run, MICRO_BATCHES).since(since).values, default=1))


def batches_through(run: RunRecord, step: int) -> int:
    """Micro-batches of a data shard through a step; a row's number holds since the row before."""
    total, before, m = 0.0, 0, float(micro_batches(run))  # rows have a schedule's alone
    for logged, m in zip(*run.train.column(MICRO_BATCHES), strict=True):
        total, before = total + (min(logged, step) - min(before, step)) * m, logged
    return int(total + max(step - before, 0) * m)


def has_full_rows(run: RunRecord) -> bool:
    """Whether a document stays on its row, and each data shard has a pool of its own."""
    return bool(run.setting("data.mixing.batching_mode") == "per_row")
