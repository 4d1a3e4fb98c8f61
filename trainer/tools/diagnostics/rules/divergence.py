"""What the first loss of a run says of the others: the run diverged, or rose far above it and came back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from trainer.tools.diagnostics.series import Series, typical_deviation

MIN_ROWS = 5
END_ROWS = (3, 16)
DOUBLED = 2.0
MANY_ROWS = 17
END_RISE = 0.25
END_SIGMAS = 5.0
BUMP = 1.5
LONE_BUMP = 3.0
BUMP_SIGMAS = 10.0
MIN_RISE = 0.1


@dataclass(frozen=True)
class Level:
    """A loss and the rows, by index into the finite ones, that show it beside the first row."""

    value: float
    rows: tuple[int, ...]


def finite(loss: Series) -> Series:
    """The rows whose loss is finite: those that are not are another rule's."""
    return loss.at(loss.where(math.isfinite))


def end_above_first(loss: Series) -> Level | None:
    """The median loss of the last rows (a quarter of all, 3 to 16) if the run ended above its first row; None: it did not.

    The first row is a single one, so it may be low by chance: by noise, or by a source with low losses. Every one of the last
    rows must therefore be twice the first. From `MANY_ROWS` rows on, the noise can be estimated: a median that is `END_RISE`
    higher, by `END_SIGMAS` deviations, is enough if every one of the last rows is nearer to it than to the first.

    Args:
        loss: finite losses. A first one of 0 or less has no multiples: such losses are not judged.
    """
    if len(loss) < MIN_ROWS or (first := loss.values[0]) <= 0:
        return None
    least, most = END_ROWS
    start = len(loss) - max(least, min(len(loss) // 4, most))
    last = loss.values[start:]
    end, lowest = median(last), min(last)
    rise = end - first
    has_doubled = lowest >= DOUBLED * first
    is_beyond_noise = (
        len(loss) >= MANY_ROWS
        and rise >= END_RISE * first
        and rise > END_SIGMAS * noise(loss.values[-2 * most :])
        and lowest - first > end - lowest
    )
    if rise < MIN_RISE or not (has_doubled or is_beyond_noise):
        return None
    return Level(end, tuple(range(start, len(loss))))


def bump(loss: Series) -> Level | None:
    """The highest loss of the first half if that is far above the first row, and the second half is back; None: it is not.

    Two rows in a row must be `BUMP` times the first, or one `LONE_BUMP` times; a single row in between may be a batch of a
    source with other losses. The second half, whose noise counts, must stay nearer to the first row than to the highest.

    Args:
        loss: finite losses, as for `end_above_first`.
    """
    if len(loss) < MIN_ROWS or (first := loss.values[0]) <= 0:
        return None
    half = len(loss) // 2
    before, after = loss.values[:half], loss.values[half:]
    peak = max(before)
    is_high = [value > BUMP * first for value in before]
    lasts = any(a and b for a, b in pairwise(is_high))
    is_far = peak - first > max(MIN_RISE, BUMP_SIGMAS * noise(after)) and (lasts or peak > LONE_BUMP * first)
    if not is_far or max(after) - first >= peak - max(after):
        return None
    return Level(peak, tuple(index for index, high in enumerate(is_high) if high))


def noise(values: Iterable[float]) -> float:
    """Robust deviation of three values or more from second differences, which ignore a falling loss; theirs is sqrt(6) times
    that of a value.
    """
    listed = list(values)
    bends = [a - 2 * b + c for a, b, c in zip(listed, listed[1:], listed[2:], strict=False)]
    return typical_deviation(bends, 0.0) / math.sqrt(6)
