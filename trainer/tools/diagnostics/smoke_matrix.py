"""The smoke matrix: short runs with one known fault each, and whether diagnosis reports exactly these faults.

`CASES` holds all expectations; `scripts/smoke_matrix.py` starts the runs; docs/smoke_matrix.md explains the choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from trainer.tools.diagnostics import run as run_rules
from trainer.tools.diagnostics.rule import series
from trainer.tools.runs.load import RunRecord

RECALL_LOSS: Final = "modality/recall/loss"
SPEED_RULES: Final = frozenset(rule.name for rule in run_rules.SPEED_RULES)
"""Displayed but not judged: in a run of half a minute they report what else the machine was doing."""


@dataclass(frozen=True)
class Case:
    """One run of the matrix.

    Attributes:
        name: of the run, and of its config unless `config` is given.
        expected: the rules that must report a finding; no others may.
        provokes: what the config does wrong, in words.
        control: the run without the fault, whose loss at the same steps is compared.
        config: file below `train_configs/diagnostics`, without the suffix.
        overrides: `--set` arguments of the run.
    """

    name: str
    expected: frozenset[str]
    provokes: str
    control: str | None = None
    config: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def config_name(self) -> str:
        """The name of the config."""
        return self.config or self.name


LONG_STREAMS: Final = 'data.source=[{name="streams",layout="direct",paths=["data/smoke_matrix/long/recall/*"]}]'

CASES: Final = (
    Case("healthy", frozenset(), "nothing"),
    Case("diag_imbalanced_bs", frozenset({"uneven_slices"}), "batch sizes of 64 and 2 in one pool", control="healthy"),
    Case(
        "diag_exhaust_spike",
        frozenset({"exhaust_churn"}),
        "slices with as many picks as there are ranks",
        control="control_long_streams",
    ),
    Case(
        "diag_stale_false_evict",
        frozenset({"false_evictions_stale"}),
        "states evicted after 5 steps",
        control="healthy",
    ),
    Case(
        "control_long_streams",
        frozenset(),
        "nothing: the documents of diag_exhaust_spike in 8 files",
        config="diag_exhaust_spike",
        overrides=("run.name=control_long_streams", LONG_STREAMS),
    ),
)


@dataclass(frozen=True)
class Damage:
    """Mean key-recall loss over the second half of a run, and of its control over the same steps (nats per token)."""

    loss: float
    control_loss: float

    @property
    def nats(self) -> float:
        """How much higher than the control."""
        return self.loss - self.control_loss


@dataclass(frozen=True)
class Judgement:
    """The diagnosis of a case compared with its expectation.

    Attributes:
        found: findings, except those of `SPEED_RULES`.
        speed: findings of `SPEED_RULES`.
        advice: rules that gave advice, which is not judged.
        is_whole: the run reached its last step.
    """

    case: Case
    found: frozenset[str]
    speed: frozenset[str]
    advice: frozenset[str]
    is_whole: bool

    @property
    def is_right(self) -> bool:
        """Whether a complete run shows exactly the expected findings."""
        return self.is_whole and self.found == self.case.expected


def judge_all(cases: Iterable[Case], diagnoses: Mapping[str, Mapping[str, Any]], *, steps: int) -> list[Judgement]:
    """Compare diagnoses with the expectations.

    Args:
        cases: each must have a diagnosis.
        diagnoses: output of `train diagnose --json` by name of the case.
        steps: configured number of steps of the runs.
    """
    judgements = []
    for case in cases:
        diagnosis = diagnoses[case.name]
        found, extent = frozenset(diagnosis["findings"]), diagnosis["steps"]
        is_whole = extent is not None and extent[1] == steps
        advice = frozenset(diagnosis["advice"])
        judgements.append(Judgement(case, found - SPEED_RULES, found & SPEED_RULES, advice, is_whole))
    return judgements


def is_green(judgements: Sequence[Judgement]) -> bool:
    """Whether every run shows exactly the expected findings."""
    return bool(judgements) and all(judgement.is_right for judgement in judgements)


def measure_damage(run: RunRecord, control: RunRecord) -> Damage | None:
    """The damage to the loss; None if one of the runs did not log it in its second half."""
    own, other = _late_recall(run), _late_recall(control)
    return Damage(fmean(own), fmean(other)) if own and other else None


def _late_recall(run: RunRecord) -> Sequence[float]:
    half = run.steps[-1] // 2 + 1 if run.steps else 0
    return series(run, RECALL_LOSS).since(half).values
