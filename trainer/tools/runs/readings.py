"""Readings of a run, one for all that speak of it: its noise scale, its loss by set and depth."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from trainer.metrics.catalog import ERRORS_SHOWN
from trainer.tools import limits
from trainer.tools.runs.load import RunRecord
from trainer.wording import decimals_text

B_BIG: Final = "gns/b_big"
B_NOW: Final = "gns/b_now"
CROSS_ENTROPY: Final = "nats/token"


def number_text(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, more before the decimal point: 12,345, 3.2e-05."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:  # so far every digit counts
        return f"{int(value):,}"
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


@dataclass(frozen=True)
class NoiseScale:
    """The last row's noise scale, in sequences, and the batch of that step."""

    step: int
    batch: float
    low: float
    value: float | None  # None without an upper bound
    high: float | None
    steps: int  # that it was computed from
    documents: float = math.inf  # to draw from

    @property
    def is_high(self) -> bool:
        """Whether the value is too high: few documents are drawn without replacement."""
        return self.documents < limits.FEW_DOCUMENTS * max(self.value or 0.0, self.low)

    @property
    def is_known(self) -> bool:
        """Whether the bounds say anything: a lower one of 0 alone does not."""
        return self.high is not None or self.low > 0.0

    @property
    def number(self) -> str:
        """Value and bounds in words, if they are known."""
        text = f"at least {number_text(self.low)}"
        if self.high is not None and self.value is not None:
            text = f"{number_text(self.value)} ({number_text(self.low)} to {number_text(self.high)})"
        return text + f", too high with {self.documents:,.0f} documents" * self.is_high

    @property
    def where(self) -> str:
        """The rows that it was made of, in words."""
        return f"{B_NOW} at step {self.step:,}, from the last {self.steps:,} steps"


def noise_scale_of(run: RunRecord) -> NoiseScale | None:
    """The noise scale in the last row that has a batch size, if that row knows it."""
    batches = _column(run, B_BIG)
    if not batches:
        return None
    step = max(batches)
    low, high, value, steps = (_column(run, f"{B_NOW}{end}").get(step) for end in ("_low", "_high", "", "_steps"))
    if low is None or steps is None:
        return None
    documents = _column(run, "data/documents").get(step, math.inf)
    return NoiseScale(step, batches[step], low, value, high, int(steps), documents)


def _column(run: RunRecord, key: str) -> dict[int, float]:
    return dict(zip(*run.train.column(key), strict=True))


def loss_unit(*runs: RunRecord) -> str:
    """The unit of their losses; a loss of the user's own has none that is known."""
    if any(run.setting("objective.target") for run in runs):
        return "per token"
    return CROSS_ENTROPY


# ---- The loss against depth

_KEY = re.compile(r"eval/(?:([^/]+)/)?depth/(?:(\d+)|beyond_cell)/(loss|loss_from_zero|carry_gain)")


class Number(NamedTuple):
    """A value and its error over documents, NaN where it is not known; two are 95 %."""

    value: float
    error: float

    def __str__(self) -> str:
        if not math.isfinite(self.error):
            return decimals_text(self.value)
        return f"{decimals_text(self.value)} +- {decimals_text(ERRORS_SHOWN * self.error)} (95 %)"


class Point(NamedTuple):
    """The losses of targets with `start` to 2 `start` - 1 tokens before, or none; two only after a cell."""

    start: int
    loss: Number
    from_zero: Number | None
    gain: Number | None


class DepthCurve(NamedTuple):
    """The losses of one set in one evaluation."""

    points: list[Point]  # ascending
    gain: Number  # beyond a cell

    @property
    def gains(self) -> list[tuple[int, Number]]:
        """(first depth, gain) of the buckets with carried states and known errors."""
        return [(each.start, each.gain) for each in self.points if each.gain and math.isfinite(each.gain.error)]

    @property
    def is_known(self) -> bool:
        """Whether there are gains, and all losses and gains are finite."""
        numbers = [number.value for _, *found in self.points for number in found if number]
        return any(each.gain for each in self.points) and all(map(math.isfinite, numbers))


def curves_of(metrics: Mapping[str, float]) -> dict[str, DepthCurve]:
    """The curve of each set in an evaluation's metrics; the held-out documents are ""."""
    found: dict[str, dict[int, dict[str, Number]]] = {}
    for key, value in metrics.items():
        match = _KEY.fullmatch(key)
        if match:
            name, start, what = match.groups()
            number = Number(value, metrics.get(f"{key}_se", math.nan))
            found.setdefault(name or "", {}).setdefault(int(start or -1), {})[what] = number
    curves = {}
    for name, by_start in found.items():
        if "carry_gain" in by_start.get(-1, {}):
            points = [
                Point(start, each["loss"], each.get("loss_from_zero"), each.get("carry_gain"))
                for start, each in sorted(by_start.items())
                if "loss" in each
            ]
            curves[name] = DepthCurve(points, by_start[-1]["carry_gain"])
    return curves


def last_curves(run: RunRecord) -> tuple[int, dict[str, DepthCurve]]:
    """(number of evaluations, each set's curve in the last one, if all its gains are finite)."""
    columns = {key: run.column(key) for key in run.keys if depth_set(key) is not None}
    number = max((len(steps) for steps, _ in columns.values()), default=0)
    last = max([*run.evals.steps[-1:], *(steps[-1] for steps, _ in columns.values())], default=0)
    curves = curves_of({key: values[-1] for key, (steps, values) in columns.items() if steps[-1] == last})
    return number, {name: curve for name, curve in curves.items() if curve.is_known}


def depth_set(key: str) -> str | None:
    """The set of which it is one of these numbers, or its error; None: it is none."""
    match = _KEY.fullmatch(key.removesuffix("_se"))
    return match and (match[1] or "")


def unused_from(gains: Sequence[tuple[int, Number]], least: float) -> int | None:
    """The depth from which on no gain can be `least`; None if the deepest can."""
    found = None
    for start, gain in reversed(gains):
        if gain.value + ERRORS_SHOWN * gain.error >= least:
            break
        found = start
    return found


def in_words(curve: DepthCurve, cell: int) -> str:
    """In words: "over documents, carrying lowers the loss by 0.12 +- 0.02 (95 %) beyond ..."."""
    gain, beyond = curve.gain, "beyond a cell"
    if cell:
        beyond = f"beyond {cell:,} tokens"
    if not math.isfinite(gain.value):
        return f"over documents, carrying changes the loss by {gain.value} {beyond}"
    carrying, noise = "over documents, carrying", ERRORS_SHOWN * gain.error
    if not math.isfinite(gain.error):
        carrying, noise = "carrying", 0.0
        beyond += " (too few documents for its error)"
    loss = gain._replace(value=-gain.value)
    if abs(gain.value) <= noise:
        return f"{carrying} changes the loss by {loss} {beyond}: nothing to tell from 0"
    if gain.value < 0:
        return f"{carrying} raises the loss by {loss} {beyond}"
    words, depth = f"{carrying} lowers the loss by {gain} {beyond}", unused_from(curve.gains, gain.value / 4)
    if depth is not None and depth > curve.gains[0][0]:
        words += f"; nothing beyond {depth:,}"
    return words
