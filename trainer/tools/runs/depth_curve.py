"""The numbers that `depth` reports, read back: by set and depth, and in words. Needs the standard library alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.metrics.catalog.lookup import ERRORS_SHOWN

_KEY = re.compile(r"eval/(?:([^/]+)/)?depth/(?:(\d+)|beyond_cell)/(loss|loss_from_zero|carry_gain)")


class Number(NamedTuple):
    """A value and its error over documents, NaN where it is not known; two are 95 %."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (
            f" +- {ERRORS_SHOWN * self.error:.4f} (95 %)" if math.isfinite(self.error) else ""
        )


class Point(NamedTuple):
    """The losses of the targets with `start` to 2 `start` - 1 tokens before; without the last two in a first cell."""

    start: int
    loss: Number
    from_zero: Number | None
    gain: Number | None


class DepthCurve(NamedTuple):
    """Of one set and evaluation."""

    points: list[Point]
    """Ascending."""
    gain: Number
    """Beyond a cell."""

    @property
    def gains(self) -> list[tuple[int, Number]]:
        """(first depth, gain) of the buckets in which states are carried, and the errors are known."""
        return [(each.start, each.gain) for each in self.points if each.gain and math.isfinite(each.gain.error)]


def curves_of(metrics: Mapping[str, float]) -> dict[str, DepthCurve]:
    """The curve of each set in an evaluation's metrics; the held-out documents are ""."""
    found: dict[str, dict[int, dict[str, Number]]] = {}
    for key, value in metrics.items():
        if match := _KEY.fullmatch(key):
            name, start, what = match.groups()
            number = Number(value, metrics.get(f"{key}_se", math.nan))
            found.setdefault(name or "", {}).setdefault(int(start or -1), {})[what] = number
    return {
        name: DepthCurve(
            [
                Point(start, each["loss"], each.get("loss_from_zero"), each.get("carry_gain"))
                for start, each in sorted(by_start.items())
                if "loss" in each
            ],
            by_start[-1]["carry_gain"],
        )
        for name, by_start in found.items()
        if "carry_gain" in by_start.get(-1, {})
    }


def is_by_depth(key: str) -> bool:
    """Whether it is one of these numbers, or its error."""
    return _KEY.fullmatch(key.removesuffix("_se")) is not None


def lines_of(metrics: Mapping[str, float], config: Any) -> list[str]:
    """What carrying is worth in each set of an evaluation, for the end of a run."""
    cell = config.data.seq_len
    return [f"{name or 'held out'}: {in_words(curve, cell)}" for name, curve in curves_of(metrics).items()]


def unused_from(gains: Sequence[tuple[int, Number]], least: float) -> int | None:
    """The depth from which on no gain can be `least` (two errors above the measured one); None if the deepest can."""
    found = None
    for start, gain in reversed(gains):
        if gain.value + ERRORS_SHOWN * gain.error >= least:
            break
        found = start
    return found


def in_words(curve: DepthCurve, cell: int) -> str:
    """What carrying is worth: "over documents, carrying lowers the loss by 0.12 +- 0.02 (95 %) beyond 1,024 tokens"."""
    gain, beyond = curve.gain, f"beyond {cell:,} tokens" if cell else "beyond a cell"
    has_error = math.isfinite(gain.error)
    carrying = "over documents, carrying"
    if not has_error:
        carrying, beyond = "carrying", f"{beyond} (too few documents for its error)"
    if abs(gain.value) <= (ERRORS_SHOWN * gain.error if has_error else 0.0):
        return f"{carrying} changes the loss by {gain._replace(value=-gain.value)} {beyond}: nothing to tell from 0"
    if gain.value < 0:
        return f"{carrying} raises the loss by {gain._replace(value=-gain.value)} {beyond}"
    words = f"{carrying} lowers the loss by {gain} {beyond}"
    depth = unused_from(curve.gains, gain.value / 4)
    return f"{words}; nothing beyond {depth:,}" if depth is not None and depth > curve.gains[0][0] else words
