"""The parts of a diagnosis rule: series of a run's record, facts about the run, outcomes, and the rule itself."""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Literal

from trainer.metrics.payload_contract import non_finite_word
from trainer.tools import limits
from trainer.tools.runs.load import RunRecord
from trainer.wording import listed

RuleVerdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]
MAX_EVIDENCE: Final = 12
MODALITIES: Final = "stream_mixing/active/modalities/"
MICRO_BATCHES: Final = "train/micro_batches"


@dataclass(frozen=True)
class Evidence:
    """Some steps of one key, and its values there."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: NaN and infinities become words."""
        values = list(map(_json_number, self.values))
        return {"key": self.key, "steps": list(self.steps), "values": values}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else non_finite_word(value)


@dataclass(frozen=True)
class Series:
    """The logged steps of a key, ascending, and its values there; false if the run does not log the key."""

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

    def largest(self, count: int = 1) -> list[int]:
        """The indices of the `count` largest values, ascending."""
        return sorted(heapq.nlargest(count, range(len(self)), key=self.values.__getitem__))

    def at(self, indices: Iterable[int]) -> Series:
        pairs = [(self.steps[index], self.values[index]) for index in indices]
        return Series(self.key, array("q", (step for step, _ in pairs)), array("d", (value for _, value in pairs)))

    def since(self, step: int) -> Series:
        return self.at(index for index, logged in enumerate(self.steps) if logged >= step)

    def evidence(self, indices: Iterable[int] | None = None) -> Evidence:
        """Steps and values at some indices (None: all), at most `MAX_EVIDENCE`: first, last and evenly between."""
        if indices is None:
            indices = range(len(self))
        shown = list(indices)
        if len(shown) > MAX_EVIDENCE:
            stride = (len(shown) - 1) / (MAX_EVIDENCE - 1)
            shown = [shown[round(k * stride)] for k in range(MAX_EVIDENCE)]
        column = self.at(shown)
        return Evidence(self.key, tuple(column.steps), tuple(column.values))


def series(run: RunRecord, key: str) -> Series:
    """The values of a key; empty if the run does not log it."""
    return Series(key, *run.column(key))


def aligned(*columns: Series) -> list[Series]:
    """The columns at the steps that all of them have."""
    if all(column.steps == columns[0].steps for column in columns):
        return list(columns)
    common = set(columns[0].steps).intersection(*(column.steps for column in columns))
    return [column.at(i for i, step in enumerate(column.steps) if step in common) for column in columns]


def micro_batches(run: RunRecord, since: int = 0) -> int:
    """Micro-batches per step and rank, the fewest since a step where they change; 1 if unknown."""
    setting = run.setting("train.micro_batches")
    if isinstance(setting, int):
        return max(setting, 1)
    # A schedule: only the record says what it came to.
    return int(min(series(run, MICRO_BATCHES).since(since).values, default=1))


def batches_through(run: RunRecord, step: int) -> int:
    """Micro-batches of a rank through a step. Where their number changes, as many in each step as in the next logged one."""
    if isinstance(run.setting("train.micro_batches"), int):
        return step * micro_batches(run)
    total, before, m = 0.0, 0, 1.0
    for logged, m in zip(*run.train.column(MICRO_BATCHES), strict=True):
        total, before = total + (min(logged, step) - min(before, step)) * m, logged
    return int(total + max(step - before, 0) * m)


def ranks(run: RunRecord) -> int:
    """Number of ranks; 1 if unknown."""
    return run.world_size or 1


def sources(run: RunRecord) -> list[Mapping[str, Any]]:
    """The tables `[[data.source]]`."""
    found = run.setting("data.source")
    if not isinstance(found, list):  # the file may have been edited by hand
        return []
    return [table for table in found if isinstance(table, Mapping)]


def is_one_pool(run: RunRecord) -> bool:
    """Whether a rank has a single pool; in a record without a config, of several sources some row has an inexact share."""
    tables = sources(run)
    if tables and not any("include" in table for table in tables):
        return len(tables) == 1
    return not any(series(run, "blend/max_share_error").values)


def has_full_rows(run: RunRecord) -> bool:
    """Whether a document stays on its row, and each data shard has a pool of its own, of which a pick is a document."""
    return bool(run.setting("data.mixing.batching_mode") == "per_row")


def modality_columns(run: RunRecord) -> list[Series]:
    """Active readers by modality."""
    return [series(run, key) for key in run.train.keys if key.startswith(MODALITIES)]


@dataclass(frozen=True)
class Knob:
    """A setting to change: its config key, its current value (None: unknown) and a value to try.

    `condition`: when the value is worth trying, and what to do otherwise; empty: always.
    """

    key: str
    current: Any
    suggested: Any
    condition: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields; the condition where there is one."""
        return {name: value for name, value in vars(self).items() if name != "condition" or value}

    def __str__(self) -> str:
        text = f"{self.key} = {self.suggested}"
        if self.current is not None:
            text += f" (now {self.current})"
        return f"{text}, {self.condition}" if self.condition else text


def lower_lr(run: RunRecord) -> Knob:
    """Half the learning rate; the default of optimizer.lr for one with which nothing trains."""
    lr = run.setting("optimizer.lr")
    if not isinstance(lr, float):
        return Knob("optimizer.lr", lr, "half of it")
    is_adamw = run.setting("optimizer.name", "adamw") == "adamw"
    largest = limits.LARGEST_LR if is_adamw else limits.LARGEST_PLAIN_LR
    return Knob("optimizer.lr", lr, lr / 2 if lr <= largest else limits.DEFAULT_LR)


@dataclass(frozen=True)
class Outcome:
    """The result of a rule on a run; see `healthy`, `explained`, `not_measured`, `not_yet` and `finding`."""

    verdict: RuleVerdict
    sentence: str  # what was measured
    evidence: tuple[Evidence, ...] = ()  # the steps to look at, at most `MAX_EVIDENCE` per key
    knob: Knob | None = None  # the setting to change, for findings
    severity: Severity | None = None  # overrides the severity of the rule
    # not measured because the run has too few rows or steps so far; more of the same would do.
    is_early: bool = False


def healthy(sentence: str) -> Outcome:
    """Measured and within bounds."""
    return Outcome("healthy", sentence)


def explained(sentence: str) -> Outcome:
    """The symptom is present, but another rule reports its cause."""
    return Outcome("explained", sentence)


def not_measured(reason: str) -> Outcome:
    """The run lacks the keys, or the rule does not apply to it. See `not_yet` for one that is too short."""
    return Outcome("not_measured", reason)


def not_yet(reason: str) -> Outcome:
    """Not measured, because the run has too few rows or steps so far."""
    return Outcome("not_measured", reason, is_early=True)


def finding(sentence: str, *evidence: Evidence, knob: Knob | None = None, severity: Severity | None = None) -> Outcome:
    return Outcome("finding", sentence, evidence, knob, severity)


def unlogged(keys: Sequence[str], hint: str = "") -> Outcome:
    """The outcome for a run without some keys. `hint`: what makes a run log them."""
    needed = f"needs {listed(keys)}"
    if hint:
        needed += f"; {hint}"
    return not_measured(needed)


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
        """The condition for a finding, the reason for the threshold, and what to change, in words."""
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
    """Make a rule of a pure function of a run's record, with the function's name; for the arguments see `Rule`.

    Its section in rules.md, which docs/diagnosis.md shows, says when it finds something, why, and what to change.
    """
    return lambda check: Rule(check.__name__, severity, check, tuple(needs), tuple(uses), hint)
