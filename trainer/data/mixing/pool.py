"""The pool of active readers: picking one, and what is observed of the pool at each pick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

PickMode: TypeAlias = Literal["weighted", "uniform", "round_robin"]
PICK_MODES: tuple[PickMode, ...] = ("weighted", "uniform", "round_robin")

REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
FRACTION_MAX = "stream_mixing/active/remaining_fraction_max"
STEPS_SINCE_PICK_MAX = "stream_mixing/active/steps_since_pick_max"
PICK_SURPRISE_MAX = "stream_mixing/active/pick_surprise_max"
EXHAUST_EVENTS = "stream_mixing/refill/exhaust_events"
MODALITY_PREFIX = "stream_mixing/active/modalities/"

# Rows of the pool's statistics. Minima are kept negated, so that one maximum over the readers answers all of them; the
# pick at which a reader was last picked too, since the longest wait belongs to the smallest of those.
_NEG_REMAINING, _REMAINING, _NEG_FRACTION, _FRACTION, _NEG_LAST_PICK, _SURPRISE = range(6)


class PoolState(TypedDict):
    """What a pool has observed."""

    num_picks: int
    waits: list[list[float]]
    """Of each slot: minus the pick at which its reader was last picked, and the surprise at its waiting since."""
    seen: dict[str, float]
    """What the last pick saw."""


class Labelled(Protocol):
    """Something that has a modality."""

    @property
    def modality(self) -> str:
        """The label."""


class PoolReader(Protocol):
    """What the pool looks at in a reader; see `StreamReader`."""

    @property
    def stream(self) -> Labelled:
        """What it reads."""

    @property
    def remaining_picks(self) -> int:
        """Batches left until it is exhausted."""

    @property
    def remaining_fraction(self) -> float:
        """Share of its slice that is not read yet."""


Reader = TypeVar("Reader", bound=PoolReader)


class ActivePool(Generic[Reader]):
    """The active readers, one a slot.

    What is reported is the pool as it was when the last pick was drawn. So the picked reader's progress is not noted
    before the next pick, and before readers come or go the peaks are taken.

    Args:
        modalities: all that can occur; each is reported at every pick, zero included.
        pick_mode: `weighted` (in proportion to remaining picks), `uniform`, or `round_robin` (slots in turn).
    """

    def __init__(self, modalities: Sequence[str], pick_mode: PickMode) -> None:
        self.readers: list[Reader] = []
        self.turn = 0  # the slot that round_robin picks next
        self._pick_mode = pick_mode
        self._stats = np.zeros((6, 0))
        self._counts: dict[str, float] = dict.fromkeys((MODALITY_PREFIX + m for m in sorted(modalities)), 0.0)
        self._num_picks = 0
        self._moved: int | None = None  # the slot whose reader moved since the statistics were noted
        self._lone = (0.0, 0.0)  # remaining picks and fraction of a reader that was alone when it was picked
        self._seen: dict[str, float] | None = {}  # what the last pick saw; None: not worked out yet

    def add(self, reader: Reader) -> None:
        """Give the reader a new slot, the last."""
        self._settle()
        self.readers.append(reader)
        self._counts[MODALITY_PREFIX + reader.stream.modality] += 1.0
        self._stats = np.concatenate([self._stats, np.zeros((6, 1))], axis=1)
        self._note(len(self.readers) - 1)

    def replace(self, slot: int, reader: Reader | None) -> None:
        """Put a reader into a slot, or, without one, drop the slot."""
        self._settle()
        self._counts[MODALITY_PREFIX + self.readers[slot].stream.modality] -= 1.0
        if reader is None:
            del self.readers[slot]
            self._stats = np.delete(self._stats, slot, axis=1)
            self.turn -= self.turn > slot
            self.turn %= max(len(self.readers), 1)
            return
        self.readers[slot] = reader
        self._counts[MODALITY_PREFIX + reader.stream.modality] += 1.0
        self._note(slot)

    def _note(self, slot: int) -> None:
        """Write down a reader that was picked last, or that enters."""
        reader = self.readers[slot]
        remaining, fraction = reader.remaining_picks, reader.remaining_fraction
        self._stats[:, slot] = (-remaining, remaining, -fraction, fraction, -self._num_picks, 0.0)

    def _settle(self) -> None:
        """Take the peaks that the last pick saw, and note what it moved."""
        if self._seen is None:
            self._seen = self._peaks()
        if self._moved is not None:
            self._note(self._moved)
            self._moved = None

    def pick(self, uniform: float) -> int:
        """Choose a slot, and observe the pool: what remains as it was before this pick, waits with it counted.

        Args:
            uniform: a number in [0, 1) that decides; not used by round_robin.
        """
        self._seen = None
        num_readers = len(self.readers)
        if num_readers == 1:
            # Sources of a blend often have one stream each: nothing to choose, and nothing to compare.
            reader = self.readers[0]
            self._lone = float(reader.remaining_picks), reader.remaining_fraction
            self._num_picks += 1
            self._moved = 0
            return 0
        if self._moved is not None:
            self._note(self._moved)
        stats = self._stats
        if self._pick_mode == "weighted":
            remaining = stats[_REMAINING]
            ends = remaining.cumsum()  # whole numbers below 2^53: exact in float64
            total = float(ends[-1])
            # uniform * total may round up to total itself.
            slot = min(int(ends.searchsorted(uniform * total, side="right")), num_readers - 1)
            stats[_SURPRISE] -= np.log1p(remaining / -total)
        elif self._pick_mode == "uniform":
            slot = int(uniform * num_readers)
            stats[_SURPRISE] -= math.log1p(-1.0 / num_readers)
        else:
            slot = self.turn
            self.turn = (slot + 1) % num_readers
        self._num_picks += 1
        stats[_NEG_LAST_PICK, slot] = -self._num_picks
        stats[_SURPRISE, slot] = 0.0
        self._moved = slot
        return slot

    def _peaks(self) -> dict[str, float]:
        """What the last pick saw, from statistics that nothing has changed since."""
        if len(self.readers) == 1:
            remaining, fraction = self._lone
            low, high, low_fraction, high_fraction, wait, surprise = remaining, remaining, fraction, fraction, 0.0, 0.0
        else:
            peaks: list[float] = np.maximum.reduce(self._stats, axis=1).tolist()
            low, high = -peaks[_NEG_REMAINING], peaks[_REMAINING]
            low_fraction, high_fraction = 0.0 - peaks[_NEG_FRACTION], peaks[_FRACTION]  # 0.0 -: no negative zero
            wait, surprise = self._num_picks + peaks[_NEG_LAST_PICK], peaks[_SURPRISE]
        return {
            REMAINING_MIN: low,
            REMAINING_MAX: high,
            FRACTION_MIN: low_fraction,
            FRACTION_MAX: high_fraction,
            STEPS_SINCE_PICK_MAX: wait,
            PICK_SURPRISE_MAX: surprise,
            **self._counts,
        }

    def snapshot(self) -> dict[str, float]:
        """The pool that the last pick was drawn from; empty before the first pick."""
        return self._peaks() if self._seen is None else self._seen.copy()

    def observed(self) -> PoolState:
        """What has been observed so far, as plain python: for `restore`, so that waits go on over a resume."""
        self._settle()
        waits = self._stats[[_NEG_LAST_PICK, _SURPRISE]].T.tolist()
        return {"num_picks": self._num_picks, "waits": waits, "seen": self.snapshot()}

    def restore(self, state: PoolState) -> None:
        """Go on from what another pool had observed, once the same readers are in the same slots."""
        self._num_picks = state["num_picks"]
        self._seen = dict(state["seen"])
        for slot, (neg_last_pick, surprise) in enumerate(state["waits"]):
            self._stats[_NEG_LAST_PICK, slot] = neg_last_pick
            self._stats[_SURPRISE, slot] = surprise
