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
LONG_STREAMS: Final = 'data.source=[{name="streams",root="data/smoke_matrix/long"}]'


@dataclass(frozen=True)
class Case:
    """One run of the matrix."""

    name: str
    expected: frozenset[str]  # the rules that must report a finding; no others may
    provokes: str  # what the config does wrong
    control: str | None = None  # the run without the fault, whose loss at the same steps is compared
    config: str = ""  # file below `train_configs/diagnostics`, without the suffix; empty: named like the run
    overrides: tuple[str, ...] = ()  # `--set` arguments of the run

    @property
    def config_name(self) -> str:
        """The name of the config."""
        return self.config or self.name


def _faulty(name: str, rule: str, provokes: str, control: str = "healthy") -> Case:
    return Case(name, frozenset({rule}), provokes, control)


CASES: Final = (
    Case("healthy", frozenset(), "nothing"),
    _faulty("diag_imbalanced_bs", "uneven_slices", "batch sizes of 64 and 2 in one pool"),
    _faulty("diag_exhaust_spike", "exhaust_churn", "slices with as many picks as ranks", "control_long_streams"),
    _faulty("diag_stale_false_evict", "false_evictions_stale", "states evicted after 5 steps"),
    Case(
        "control_long_streams",
        frozenset(),
        "nothing: the documents of diag_exhaust_spike in 8 files",
        config="diag_exhaust_spike",
        overrides=("run.name=control_long_streams", LONG_STREAMS),
    ),
)


@dataclass(frozen=True)
class Judgement:
    """The findings of a case, those about speed (`SPEED_RULES`) apart, and whether the run reached its last step."""

    case: Case
    found: frozenset[str]
    speed: frozenset[str]
    is_whole: bool

    @property
    def is_right(self) -> bool:
        """Whether a complete run shows exactly the expected findings."""
        return self.is_whole and self.found == self.case.expected


def judge_all(cases: Iterable[Case], diagnoses: Mapping[str, Mapping[str, Any]], *, steps: int) -> list[Judgement]:
    """Compare diagnoses (output of `train diagnose --json` by name of the case) of runs of `steps` steps with the
    expectations."""
    judgements = []
    for case in cases:
        found, extent = frozenset(diagnoses[case.name]["findings"]), diagnoses[case.name]["steps"]
        is_whole = extent is not None and extent[1] == steps
        judgements.append(Judgement(case, found - SPEED_RULES, found & SPEED_RULES, is_whole))
    return judgements


def is_green(judgements: Sequence[Judgement]) -> bool:
    """Whether every run shows exactly the expected findings."""
    return bool(judgements) and all(judgement.is_right for judgement in judgements)


def measure_damage(run: RunRecord, control: RunRecord) -> tuple[float, float] | None:
    """Mean key-recall loss over the second half of a run, and of its control over the same steps (nats per token); None if one
    of them did not log it there."""
    halves = [series(each, RECALL_LOSS).since(each.steps[-1] // 2 + 1).values for each in (run, control) if each.steps]
    return (fmean(halves[0]), fmean(halves[1])) if len(halves) == 2 and all(halves) else None
