"""The smoke matrix: which short runs must show which findings, and whether a diagnosis says just that.

Everything that is expected stands in `CASES`; `scripts/smoke_matrix.py` starts the runs. docs/smoke_matrix.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from trainer.diagnostics.series import series
from trainer.runs.load import Run

RECALL_LOSS: Final = "modality/recall/loss"
SPEED_RULES: Final = frozenset({"throughput_regression", "data_bound", "straggling_rank"})
"""What they find in a run of half a minute is what else the machine was doing: shown, but not judged."""


@dataclass(frozen=True)
class Case:
    """One run of the matrix.

    Attributes:
        name: of the run; the config's too, unless `config` says otherwise.
        expected: the rules that must find something, and no others may.
        provokes: what the config does, in words.
        control: the run that lacks the one thing that this one does wrong; its loss at the same steps is compared.
        config: below `train_configs/diagnostics`, without the suffix.
        overrides: `--set` of the run.
    """

    name: str
    expected: frozenset[str]
    provokes: str
    control: str | None = None
    config: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def config_name(self) -> str:
        """The config's name."""
        return self.config or self.name


LONG_STREAMS: Final = 'data.source=[{name="streams",layout="direct",paths=["data/smoke_matrix/long/recall/*"]}]'

CASES: Final = (
    Case("healthy", frozenset(), "nothing"),
    Case(
        "diag_imbalanced_bs",
        frozenset({"uneven_slices"}),
        "batch sizes of 64 and 2 in one pool",
        control="healthy",
    ),
    Case(
        "diag_exhaust_spike",
        frozenset({"exhaust_churn"}),
        "slices of as many picks as ranks",
        control="control_long_streams",
    ),
    Case(
        "diag_stale_false_evict",
        frozenset({"false_evictions_stale"}),
        "states dropped after 5 steps",
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
    """The loss of key recall over the second half of a run, and of its control at the same steps (nats a token)."""

    loss: float
    control_loss: float

    @property
    def nats(self) -> float:
        """How much worse than the control."""
        return self.loss - self.control_loss


@dataclass(frozen=True)
class Judgement:
    """A case, and what a diagnosis said of its run."""

    case: Case
    found: frozenset[str]
    speed: frozenset[str]
    """Findings about the machine's speed, which are not judged."""
    advice: frozenset[str]
    is_whole: bool
    """The run came to its last step."""

    @property
    def missing(self) -> frozenset[str]:
        """Expected, and not found."""
        return self.case.expected - self.found

    @property
    def unexpected(self) -> frozenset[str]:
        """Found, and not expected."""
        return self.found - self.case.expected

    @property
    def is_right(self) -> bool:
        """Exactly what was expected, of a whole run."""
        return self.is_whole and not self.missing and not self.unexpected


def judge(case: Case, diagnosis: Mapping[str, Any], *, steps: int) -> Judgement:
    """Compare a diagnosis with what is expected.

    Args:
        case: of the matrix.
        diagnosis: what `train diagnose --json` printed for its run.
        steps: the run's configured steps.
    """
    found = frozenset(diagnosis["findings"])
    reached = diagnosis["steps"]
    return Judgement(
        case=case,
        found=found - SPEED_RULES,
        speed=found & SPEED_RULES,
        advice=frozenset(diagnosis["advice"]),
        is_whole=reached is not None and reached[1] == steps,
    )


def judge_all(cases: Iterable[Case], diagnoses: Mapping[str, Mapping[str, Any]], *, steps: int) -> list[Judgement]:
    """A judgement for every case; a run without a diagnosis is a KeyError."""
    return [judge(case, diagnoses[case.name], steps=steps) for case in cases]


def is_green(judgements: Sequence[Judgement]) -> bool:
    """Every run shows exactly what it must."""
    return bool(judgements) and all(judgement.is_right for judgement in judgements)


def measure_damage(run: Run, control: Run) -> Damage | None:
    """How far the loss was damaged; None if either run has no such loss in its second half."""
    own = _late_recall(run)
    other = _late_recall(control)
    return Damage(fmean(own), fmean(other)) if own and other else None


def _late_recall(run: Run) -> list[float]:
    half = run.steps[-1] // 2 + 1 if len(run.steps) else 0
    return list(series(run, RECALL_LOSS).since(half).values)
