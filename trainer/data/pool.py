"""The pool of open streams that every pick chooses from, and its metrics."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.layout import Stream
from trainer.options import PickMode

STAGES = ("open", "read", "own_code")  # of reading, timed separately

REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
FRACTION_MAX = "stream_mixing/active/remaining_fraction_max"
STEPS_SINCE_PICK_MAX = "stream_mixing/active/steps_since_pick_max"
PICK_SURPRISE_MAX = "stream_mixing/active/pick_surprise_max"
MODALITY_PREFIX = "stream_mixing/active/modalities/"
EXHAUST_EVENTS = "stream_mixing/refill/exhaust_events"
ABSENCE_PREFIX = "stream_mixing/refill/absence/"
PICKS = "stream_mixing/active/picks"

# Rows of the pool's statistics. The last pick is negated, so that the longest wait has the largest.
_REMAINING, _FRACTION, _NEG_LAST_PICK, _SURPRISE = range(4)
Floats = npt.NDArray[np.float64]


def pool_metric_keys(modalities: Iterable[str]) -> tuple[str, ...]:
    peaks = (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN, FRACTION_MAX)
    others = (prefix + name for prefix in (MODALITY_PREFIX, ABSENCE_PREFIX) for name in sorted(modalities))
    return (*peaks, STEPS_SINCE_PICK_MAX, PICK_SURPRISE_MAX, *others, EXHAUST_EVENTS, PICKS)


class PoolReader(Protocol):
    """An open part of a stream, of which `taken` picks were taken."""

    stream: Stream
    taken: int

    @property
    def remaining_picks(self) -> int: ...

    @property
    def remaining_fraction(self) -> float: ...

    @property
    def cursor(self) -> Sequence[int]:
        """How far it was read, for a state."""


ReaderT = TypeVar("ReaderT", bound=PoolReader)


class ActivePool(Generic[ReaderT]):
    """The active readers, one per slot.

    `seen` holds the metrics of the last pick: what remained before it, and waits with it counted;
    empty before the first. All `modalities` are reported, zeros included.
    """

    def __init__(self, modalities: Sequence[str], pick_mode: PickMode) -> None:
        self.readers: list[ReaderT] = []
        self.turn = 0  # the slot that round_robin picks next
        self._seen: dict[str, float] | None = {}  # None: not computed yet from the last pick
        self._last_pick: tuple[Floats, int, dict[str, float]]  # statistics, picks and counts
        self._pick_mode = pick_mode
        self._stats = np.zeros((4, 0))
        self._counts = {MODALITY_PREFIX + modality: 0.0 for modality in sorted(modalities)}
        # By modality: -ln of the chance that, of the streams opened since, none is of it.
        self.absences = dict.fromkeys(modalities, 0.0)
        self._events = dict.fromkeys((EXHAUST_EVENTS, PICKS), 0.0)  # since the last drain
        self._num_picks = 0

    def add(self, reader: ReaderT) -> None:
        self.readers.append(reader)
        self._stats = np.concatenate([self._stats, np.zeros((4, 1))], axis=1)
        self._begin(len(self.readers) - 1)

    def replace(self, slot: int, reader: ReaderT | None) -> None:
        """Put a reader into the slot of an exhausted one, or, without one, remove the slot."""
        self._events[EXHAUST_EVENTS] += 1.0
        self._counts[MODALITY_PREFIX + self.readers[slot].stream.modality] -= 1.0
        if reader is not None:
            self.readers[slot] = reader
            self._begin(slot)
            return
        del self.readers[slot]
        self._stats = np.delete(self._stats, slot, axis=1)
        if self.turn > slot:
            self.turn -= 1
        self.turn %= max(len(self.readers), 1)

    def _begin(self, slot: int) -> None:
        self._counts[MODALITY_PREFIX + self.readers[slot].stream.modality] += 1.0
        self._move(slot, 0)
        self._stats[_NEG_LAST_PICK:, slot] = (-self._num_picks, 0.0)

    def _move(self, slot: int, picks: int) -> None:
        """Move a reader on by so many picks."""
        reader = self.readers[slot]
        reader.taken += picks
        self._stats[:_NEG_LAST_PICK, slot] = (reader.remaining_picks, reader.remaining_fraction)

    def choose(self, uniforms: Iterable[float]) -> list[int]:
        """The slots of the next picks, up to one that exhausts a reader. Numbers in [0, 1) decide,
        except with round_robin."""
        left = self._stats[_REMAINING].tolist()
        slots, turn, num_readers = [], self.turn, len(left)
        ends, total = list(accumulate(left)), sum(left)  # exact: integers below 2^53
        for uniform in uniforms:
            if self._pick_mode == "weighted":
                slot = bisect_right(ends, uniform * total)
                for other in range(slot, num_readers):
                    ends[other] -= 1
                total -= 1
            elif self._pick_mode == "uniform":
                slot = int(uniform * num_readers)
            else:
                slot, turn = turn, (turn + 1) % num_readers
            slots.append(slot)
            left[slot] -= 1
            if left[slot] < 1:
                break
        return slots

    def record(self, slots: Sequence[int]) -> None:
        """Count picks and move their readers on. The last may exhaust one: then `replace` it."""
        *others, slot = slots
        self._events[PICKS] += len(slots)
        if others:
            self._skip(others)
        stats = self._stats
        stats[_SURPRISE] -= self._surprises(stats[_REMAINING])
        self._num_picks += 1
        if self._pick_mode == "round_robin":
            self.turn = (slot + 1) % len(self.readers)
        stats[_NEG_LAST_PICK, slot] = -self._num_picks
        stats[_SURPRISE, slot] = 0.0
        self._last_pick = (stats.copy(), self._num_picks, self._counts.copy())
        self._seen = None
        self._move(slot, 1)

    def _skip(self, slots: Sequence[int]) -> None:
        """Count picks of which no metric tells by itself."""
        picks = np.eye(len(self.readers))[slots]  # [n, K]
        before = picks.cumsum(0) - picks
        left, counts = self._stats[_REMAINING] - before, picks.sum(0)
        # A pick surprises those that have waited since: with none of theirs from it on.
        surprises = self._surprises(left) * (before == counts)
        earlier = self._stats[_SURPRISE] * (counts == 0)
        self._stats[_SURPRISE] = np.subtract.reduce(np.vstack([earlier, surprises]))
        lasts = -self._num_picks - (before < counts).sum(0)
        self._stats[_NEG_LAST_PICK] = np.where(counts > 0, lasts, self._stats[_NEG_LAST_PICK])
        self._num_picks += len(slots)
        for slot in set(slots):
            self._move(slot, int(counts[slot]))

    def _surprises(self, left: Floats) -> Floats:
        """The logarithm of the chance that a pick is not of each reader, [..., K].

        `left`: picks left of each before it, [..., K].
        """
        if len(self.readers) == 1 or self._pick_mode == "round_robin":
            return np.zeros_like(left)  # there is nothing to choose, and no surprise
        if self._pick_mode == "uniform":
            return np.full_like(left, math.log1p(-1.0 / len(self.readers)))
        found: Floats = np.log1p(left / -left.sum(-1, keepdims=True))
        return found

    @property
    def seen(self) -> dict[str, float]:
        if self._seen is None:
            stats, num_picks, counts = self._last_pick
            least, most = (how.reduce(stats, axis=1).tolist() for how in (np.minimum, np.maximum))
            self._seen = {
                REMAINING_MIN: least[_REMAINING],
                REMAINING_MAX: most[_REMAINING],
                FRACTION_MIN: least[_FRACTION],
                FRACTION_MAX: most[_FRACTION],
                STEPS_SINCE_PICK_MAX: num_picks + most[_NEG_LAST_PICK],
                PICK_SURPRISE_MAX: most[_SURPRISE],
                **counts,
            }
        return self._seen

    def drain(self, *, is_ended: bool) -> dict[str, float]:
        """What was seen at the last pick, if any, and the picks and exhausted readers since the
        last drain; once all data are read (`is_ended`), only the counts."""
        if is_ended:
            gauges = self._counts
        elif not self.seen:
            return {}
        else:
            gauges = self.seen | {ABSENCE_PREFIX + name: nats for name, nats in self.absences.items()}
        events, self._events = self._events, dict.fromkeys(self._events, 0.0)
        return gauges | events

    def observed(self) -> dict[str, Any]:
        """The pool's observations as plain Python, for `restore`: waits continue after a resume.

        `waits`: by slot, minus the pick at which its reader was last picked, and its surprise
        since.
        """
        waits = self._stats[_NEG_LAST_PICK:].T.tolist()
        return {"num_picks": self._num_picks, "waits": waits, "seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what a pool observed, once the same readers are in the same slots."""
        self._num_picks, self._seen = state["num_picks"], dict(state["seen"])
        if state["waits"]:
            self._stats[_NEG_LAST_PICK:] = np.transpose(state["waits"])
