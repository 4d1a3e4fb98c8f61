"""The pool of active readers: picking one, and what is observed of the pool at each pick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from trainer.data.reader import StreamReader

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

# Rows of the pool's statistics; minima are kept negated, so that one maximum over the readers answers all of them.
_NEG_REMAINING, _REMAINING, _NEG_FRACTION, _FRACTION, _WAIT, _SURPRISE = range(6)


class ActivePool:
    """The active readers, one a slot.

    Args:
        modalities: all that can occur; each is reported at every pick, zero included.
        pick_mode: `weighted` (in proportion to remaining picks), `uniform`, or `round_robin` (slots in turn).
    """

    def __init__(self, modalities: Sequence[str], pick_mode: PickMode) -> None:
        self.readers: list[StreamReader] = []
        self.turn = 0  # the slot that round_robin picks next
        self._pick_mode = pick_mode
        self._stats = np.zeros((6, 0))
        self._counts: Counter[str] = Counter(dict.fromkeys(sorted(modalities), 0))
        self._peaks: np.ndarray | None = None
        self._counts_at_pick: dict[str, int] = {}

    def add(self, reader: StreamReader) -> None:
        """Give the reader a new slot, the last."""
        self.readers.append(reader)
        self._counts[reader.stream.modality] += 1
        self._stats = np.concatenate([self._stats, np.zeros((6, 1))], axis=1)
        self._refresh(len(self.readers) - 1)

    def replace(self, slot: int, reader: StreamReader | None) -> None:
        """Put a reader into a slot, or, without one, drop the slot."""
        self._counts[self.readers[slot].stream.modality] -= 1
        if reader is None:
            del self.readers[slot]
            self._stats = np.delete(self._stats, slot, axis=1)
            self.turn -= self.turn > slot
            self.turn %= max(len(self.readers), 1)
            return
        self.readers[slot] = reader
        self._counts[reader.stream.modality] += 1
        self._stats[:, slot] = 0.0
        self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        reader, stats = self.readers[slot], self._stats
        remaining, fraction = reader.remaining_picks, reader.remaining_fraction
        stats[_NEG_REMAINING, slot], stats[_REMAINING, slot] = -remaining, remaining
        stats[_NEG_FRACTION, slot], stats[_FRACTION, slot] = -fraction, fraction

    def pick(self, uniform: float) -> int:
        """Choose a slot, and observe the pool: what remains as it was before this pick, waits with it counted.

        Args:
            uniform: a number in [0, 1) that decides; not used by round_robin.
        """
        stats, num_readers = self._stats, len(self.readers)
        surprise: np.ndarray | float = 0.0
        if self._pick_mode == "weighted":
            ends = stats[_REMAINING].cumsum()  # whole numbers below 2^53: exact in float64
            total = ends[-1]
            # uniform * total may round up to total itself.
            slot = min(int(ends.searchsorted(uniform * total, side="right")), num_readers - 1)
            if num_readers > 1:
                surprise = -np.log1p(stats[_REMAINING] / -total)
        elif self._pick_mode == "uniform":
            slot = int(uniform * num_readers)
            if num_readers > 1:
                surprise = -np.log1p(-1.0 / num_readers)
        else:
            slot = self.turn
            self.turn = (slot + 1) % num_readers
        stats[_WAIT] += 1.0
        stats[_SURPRISE] += surprise
        stats[_WAIT:, slot] = 0.0
        self._peaks = stats.max(axis=1)
        self._counts_at_pick = dict(self._counts)
        return slot

    def advance(self, slot: int) -> bool:
        """Take note that the slot's reader has moved; True if it is exhausted now."""
        self._refresh(slot)
        return self.readers[slot].remaining_picks == 0

    def snapshot(self) -> dict[str, float]:
        """The pool that the last pick was drawn from; empty before the first pick."""
        if self._peaks is None:
            return {}
        peaks = self._peaks.tolist()
        metrics = {
            REMAINING_MIN: -peaks[_NEG_REMAINING],
            REMAINING_MAX: peaks[_REMAINING],
            FRACTION_MIN: -peaks[_NEG_FRACTION] + 0.0,  # + 0.0: no negative zero
            FRACTION_MAX: peaks[_FRACTION],
            STEPS_SINCE_PICK_MAX: peaks[_WAIT],
            PICK_SURPRISE_MAX: peaks[_SURPRISE],
        }
        for modality, count in self._counts_at_pick.items():
            metrics[MODALITY_PREFIX + modality] = float(count)
        return metrics
