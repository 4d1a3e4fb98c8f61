"""The noise scale that a run ends with: one reading for all that speak of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trainer.metrics.catalog.rows_training import ONE_BATCH_SIZE
from trainer.tools import limits
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

B_BIG: Final = "gns/b_big"
READINGS: Final = ("gns/b_now", "gns/b_simple")
"""The most informative first: the second is a lagging average."""


@dataclass(frozen=True)
class NoiseScale:
    """The last row's noise scale, in sequences, and the batch of that step."""

    key: str
    step: int
    batch: float
    low: float
    value: float | None  # None without an upper bound
    high: float | None
    steps: int | None  # that it was computed from, if the record says so
    documents: float = math.inf  # to draw from

    @property
    def is_high(self) -> bool:
        """Whether the value is too high: a step draws few documents without replacement."""
        return self.documents < limits.FEW_DOCUMENTS * max(self.value or 0.0, self.low)

    @property
    def is_known(self) -> bool:
        """Whether the bounds say anything: a lower one of 0 alone does not."""
        return self.high is not None or self.low > 0.0

    @property
    def number(self) -> str:
        """Value and bounds in words."""
        if not self.is_known:
            return "not known yet"
        text = f"at least {number_text(self.low)}"
        if self.high is not None:
            text = f"{number_text(self.low)} to {number_text(self.high)}"
            if self.value is not None:
                text = f"{number_text(self.value)} ({text})"
        return f"{text}, too high with {self.documents:,.0f} documents" if self.is_high else text

    @property
    def where(self) -> str:
        """The rows that it was made of, in words."""
        where = f"{self.key} at step {self.step:,}"
        if self.steps is not None:
            where += f", from the last {self.steps:,} steps"
        return where


def noise_scale_of(run: RunRecord) -> NoiseScale | None:
    """The noise scale in the last row that has a batch size, if that row knows it."""
    batches = _column(run, B_BIG)
    if not batches:
        return None
    step = max(batches)

    def at(key: str) -> float | None:
        return _column(run, key).get(step)

    for key in READINGS:
        low, high, value, steps = (at(f"{key}{end}") for end in ("_low", "_high", "", "_steps"))
        if low is None:
            continue
        if high is None:  # a value without an upper bound says nothing
            value = None
        documents = _column(run, "data/documents").get(step, math.inf)
        return NoiseScale(key, step, batches[step], low, value, high, None if steps is None else int(steps), documents)
    return None


def why_unknown(run: RunRecord) -> str:
    """Why the run ends without a noise scale, to follow "the noise scale is"; empty if it has one,
    and where the record does not say that one was to be measured."""
    scale = noise_scale_of(run)
    if scale is not None and scale.is_known:
        return ""
    if scale is not None or _column(run, B_BIG):
        return "not known yet: neither a lower nor an upper bound"
    if run.setting("gns.enabled") is False:
        return "not measured: gns.enabled = false"
    if run.setting("train.micro_batches") == run.world_size == 1:
        return f"not measured: {ONE_BATCH_SIZE}"
    if run.setting("gns.enabled"):
        return "not known yet: no row has it"
    return ""


def _column(run: RunRecord, key: str) -> dict[int, float]:
    return dict(zip(*run.train.column(key), strict=True))
