"""The result of one rule on one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from trainer.metrics.payload_contract import non_finite_word

RuleVerdict = Literal["healthy", "finding", "explained", "not_measured"]
Severity = Literal["error", "warning", "advice"]

KNOBS: Final[Mapping[str, str]] = {
    "checkpoint.every": "the number of steps between checkpoints",
    "checkpoint.resume": "the place to resume from",
    "data.max_group_cells": "the number of cells that a state is carried across",
    "data.mixing.batch_size": "the number of sequences per micro-batch",
    "data.mixing.batch_size_by_modality": "the batch sizes of the modalities",
    "data.mixing.batching_mode": "the way in which ranks share streams",
    "data.mixing.num_streams_mixed": "the number of streams read concurrently",
    "data.mixing.pick_mode": "the way in which the next stream is picked",
    "data.mixing.repeat": "the repetition of exhausted data",
    "data.prefetch": "the number of batches loaded ahead",
    "data.source": "the data",
    "data.source.weight": "the weight of the source",
    "ledger.capacity": "the number of groups that the ledger of a rank holds",
    "ledger.stale_threshold": "the number of steps after which the ledger drops a state",
    "ledger.wipe_mode": "the ledger's wipe mode",
    "model": "the model",
    "model.trust": "the list of trusted parts of the contract",
    "optimizer.group.lr_scale": "the relative learning rate of that layer",
    "optimizer.lr": "the learning rate",
    "train.micro_batches": "the number of micro-batches per step",
}
"""What the config keys that rules name set, for runs of loops that have no config."""


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
    """What to change: its config key (one of `KNOBS`), its current value (None: unknown) and a value to try.

    `condition`: when the value is worth trying, and what to do otherwise; empty: always.
    """

    key: str
    current: Any
    suggested: Any
    condition: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields; the condition where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "condition" or value}

    def __str__(self) -> str:
        return f"{self.setting}{self.remark}"

    @property
    def setting(self) -> str:
        """The line of a config, without the remark."""
        return f"{self.key} = {self.suggested}"

    @property
    def in_words(self) -> str:
        """Without the key, for a loop that has no config."""
        return f"for {KNOBS[self.key]}, try {self.suggested}{self.remark}"

    @property
    def remark(self) -> str:
        """What is said after the value: the current one, and the condition."""
        now = f" (now {self.current})" if self.current is not None else ""
        return f"{now}, {self.condition}" if self.condition else now


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
        is_early: not measured because the run has too few rows or steps so far; more of the same would do.
    """

    verdict: RuleVerdict
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    knob: Knob | None = None
    severity: Severity | None = None
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


def finding(
    sentence: str, *, evidence: Iterable[Evidence], knob: Knob | None = None, severity: Severity | None = None
) -> Outcome:
    """A fault."""
    return Outcome("finding", sentence, tuple(evidence), knob, severity)
