"""The data pipeline with nothing in it: readers that only count, behind the real pool, the real queue and the real blend.

Every random choice of a run is a pure function of its seed and of the batch index. So counting gives the very picks that a
run of this seed will make, not merely their average, without reading a token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.data.keyed import KeyedUniforms
from trainer.data.mixing.epochs import QueueKey
from trainer.data.mixing.pool import ActivePool, PickMode
from trainer.preview.shapes import SliceShape, SourceShape, StreamShape


class CountedReader:
    """A cursor over a slice: how many of its batches have been taken, and when the last one was."""

    def __init__(self, stream: StreamShape, slices: tuple[SliceShape, ...], num_picks: int) -> None:
        self.stream = stream
        self.num_picks = num_picks
        self.picks = 0
        self.last_step = 0
        rows = np.zeros((len(slices), num_picks), dtype=np.int64)
        for place, part in zip(rows, slices, strict=True):
            place[: part.num_picks] = part.rows
        tokens_per_row = [part.tokens / max(part.num_cells, 1) for part in slices]
        self._rows: list[int] = rows.sum(axis=0).tolist()
        self._fullest: list[int] = [*rows.max(axis=0).tolist(), 0]
        self._tokens: list[float] = (np.array(tokens_per_row) @ rows).tolist()

    @property
    def remaining_picks(self) -> int:
        """Batches left."""
        return self.num_picks - self.picks

    @property
    def remaining_fraction(self) -> float:
        """Share of the batches that is left; nothing depends on it here."""
        return self.remaining_picks / self.num_picks

    @property
    def rows_ahead(self) -> int:
        """Rows of the next batch on the fullest of its ranks; 0 if there is none."""
        return self._fullest[self.picks]

    def take(self) -> tuple[int, float]:
        """Take the next batch; its rows and its tokens, over all ranks that read it."""
        self.picks += 1
        return self._rows[self.picks - 1], self._tokens[self.picks - 1]


@dataclass
class Tally:
    """What one source gave on one rank (on all ranks, where they pick together)."""

    batches: int = 0
    picks: Counter[str] = field(default_factory=Counter)
    """By modality."""
    exhausts: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, float] = field(default_factory=dict)
    """By modality; of a slice in progress in proportion to its cells."""
    absent: Counter[str] = field(default_factory=Counter)
    """Batches of this source that were picked while no reader of the modality was active."""
    waits: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """By modality: optimizer steps between two picks of one reader -> how often."""
    in_flight: int = 0
    """Rows of the active readers that have begun: states that a rank holds for this source."""


class CountedMixing:
    """What `StreamMixingDataset` does, with counts in place of tokens; yields how many rows (over its ranks) a batch has.

    Args:
        shape: of the source.
        pick_mode, repeat, seed: as of the real one.
        rank: whose pool; with a shared pool 0 stands for all.
    """

    def __init__(self, shape: SourceShape, *, pick_mode: PickMode, repeat: bool, seed: int, rank: int) -> None:
        self.shape = shape
        self.tally = Tally()
        self.step = 1
        """The optimizer step of the batch that is asked for; the blend above knows it."""
        self._rank = rank
        self._repeat = repeat
        self._key = QueueKey(shape.name, seed, len(shape.streams), shape.shared)
        self._uniforms = KeyedUniforms("pick", shape.name, seed, "all" if shape.shared else rank)
        self._pool: ActivePool[CountedReader] = ActivePool(shape.modalities, pick_mode)
        self._active: Counter[str] = Counter()
        self._epoch = -1
        self._queue: Iterator[int] = iter(())
        self._has_any = self._is_barren = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Count the next micro-batch.

        Raises:
            StopIteration: without `repeat`, after the last.
        """
        pool, tally = self._pool, self.tally
        if not pool.readers and not self._fill():
            tally.batches += 1
            return self._batch(0)
        slot = pool.pick(self._uniforms(tally.batches) if len(pool.readers) > 1 else 0.0)
        tally.batches += 1
        reader = pool.readers[slot]
        for modality in self.shape.modalities:
            if not self._active[modality]:
                tally.absent[modality] += 1
        return self._batch(self._take(slot, reader))

    def _batch(self, rows: int) -> dict[str, Any]:
        return {"dataset_labels": (), "rows": rows, "is_shared": self.shape.shared}

    def _take(self, slot: int, reader: CountedReader) -> int:
        tally, modality = self.tally, reader.stream.modality
        if reader.picks:
            tally.waits[modality][self.step - reader.last_step] += 1
        before = reader.rows_ahead if reader.picks else 0
        rows, tokens = reader.take()
        reader.last_step = self.step
        tally.in_flight += reader.rows_ahead - before
        tally.picks[modality] += 1
        tally.cells[modality] += rows
        tally.tokens[modality] = tally.tokens.get(modality, 0.0) + tokens
        if not reader.remaining_picks:
            tally.exhausts[modality] += 1
            self._active[modality] -= 1
            self._pool.replace(slot, self._next_reader())
        else:
            self._pool.note(slot)
        return rows

    def _fill(self) -> bool:
        """Fill the empty pool, from the next epoch if this one is over; False if no cell ever falls to this rank."""
        while not self._is_barren:
            while len(self._pool.readers) < self.shape.num_mixed and (reader := self._next_reader()) is not None:
                self._pool.add(reader)
            if self._pool.readers:
                return True
            if self._epoch >= 0:
                if not self._repeat:
                    raise StopIteration
                self._is_barren = not self._has_any
            self._epoch += 1
            self._has_any = False
            self._queue = iter(self._key.order(self._epoch, self._rank, []))
        return False

    def _next_reader(self) -> CountedReader | None:
        for stream_id in self._queue:
            stream = self.shape.streams[stream_id]
            slices = stream.slices if self.shape.shared else (stream.slices[self._rank],)
            num_picks = max(part.num_picks for part in slices)
            if num_picks:
                self._has_any = True
                self._active[stream.modality] += 1
                return CountedReader(stream, slices, num_picks)
        return None
