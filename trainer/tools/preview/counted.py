"""The mixing of a source with counting readers in place of data, on the real pool and the real queue.

Every random choice of a run is a pure function of its seed and of the batch index. Counting therefore gives the exact picks
of a run with this seed, without reading a token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.data.epochs import QueueKey
from trainer.data.keyed import KeyedUniforms
from trainer.data.pool import ActivePool, PickMode
from trainer.tools.preview.shapes import SliceShape, SourceShape, StreamShape


class CountedReader:
    """A cursor over the batches of a slice: of one rank, or with a shared pool of all ranks together."""

    def __init__(self, stream: StreamShape, slices: tuple[SliceShape, ...], num_picks: int) -> None:
        self.stream = stream
        self.num_picks = num_picks
        self.picks = 0
        self.last_step = 0
        rows = np.zeros((len(slices), num_picks), dtype=np.int64)
        for row, part in zip(rows, slices, strict=True):
            row[: part.num_picks] = part.rows
        tokens_per_row = np.array([part.tokens / max(part.num_cells, 1) for part in slices])
        self._rows: list[int] = rows.sum(axis=0).tolist()
        self._fullest: list[int] = [*rows.max(axis=0).tolist(), 0]
        self._tokens: list[float] = (tokens_per_row @ rows).tolist()

    @property
    def remaining_picks(self) -> int:
        """Number of batches left."""
        return self.num_picks - self.picks

    @property
    def remaining_fraction(self) -> float:
        """Fraction of the batches left; part of the reader protocol."""
        return self.remaining_picks / self.num_picks

    @property
    def rows_ahead(self) -> int:
        """Rows of the next batch on the rank that has most; 0 after the last batch."""
        return self._fullest[self.picks]

    def take(self) -> tuple[int, float]:
        """(rows, tokens) of the next batch, over all ranks that read it."""
        self.picks += 1
        return self._rows[self.picks - 1], self._tokens[self.picks - 1]


@dataclass
class Tally:
    """Counts of one source on one rank, or on all ranks if they share a pool. Counters are by modality.

    Attributes:
        batches: micro-batches.
        tokens: for a slice in progress, in proportion to its cells.
        absent: batches picked while no reader of the modality was active.
        waits: optimizer steps between two picks of a reader -> how often.
        in_flight: rows of the active readers that have started: the states that a rank holds for this source.
    """

    batches: int = 0
    picks: Counter[str] = field(default_factory=Counter)
    exhausts: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    absent: Counter[str] = field(default_factory=Counter)
    waits: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    in_flight: int = 0


class CountedMixing:
    """`StreamMixingDataset` with counts in place of tokens: yields the number of rows of each batch.

    Args:
        shape: of the source.
        pick_mode, repeat, seed: as in the real dataset.
        rank: owner of the pool; 0 for a shared pool.
    """

    def __init__(self, shape: SourceShape, *, pick_mode: PickMode, repeat: bool, seed: int, rank: int) -> None:
        self.shape = shape
        self.tally = Tally()
        self.step = 1  # the optimizer step of the next batch, set by the caller
        self._rank = rank
        self._repeat = repeat
        self._key = QueueKey(shape.name, seed, len(shape.streams), shape.shared)
        self._uniforms = KeyedUniforms("pick", shape.name, seed, "all" if shape.shared else rank)
        self._pool: ActivePool[CountedReader] = ActivePool(shape.modalities, pick_mode)
        self._active: Counter[str] = Counter()
        self._epoch = -1
        self._queue: Iterator[int] = iter(())
        self._epoch_has_cells = self._has_no_cells = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Count the next micro-batch.

        Raises:
            StopIteration: data exhausted, without `repeat`.
        """
        pool, tally = self._pool, self.tally
        rows = 0
        has_readers = bool(pool.readers) or self._fill()
        if has_readers:
            slot = pool.pick(self._uniforms(tally.batches) if len(pool.readers) > 1 else 0.0)
            tally.absent.update(modality for modality in self.shape.modalities if not self._active[modality])
            rows = self._take(slot, pool.readers[slot])
        tally.batches += 1
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
        tally.tokens[modality] += tokens
        if not reader.remaining_picks:
            tally.exhausts[modality] += 1
            self._active[modality] -= 1
            self._pool.replace(slot, self._next_reader())
        else:
            self._pool.note(slot)
        return rows

    def _fill(self) -> bool:
        """Fill the empty pool, from the next epoch if this one is over; False if no epoch has a cell for this rank."""
        while not self._has_no_cells:
            while len(self._pool.readers) < self.shape.num_mixed and (reader := self._next_reader()) is not None:
                self._pool.add(reader)
            if self._pool.readers:
                return True
            if self._epoch >= 0:
                if not self._repeat:
                    raise StopIteration
                self._has_no_cells = not self._epoch_has_cells
            self._epoch += 1
            self._epoch_has_cells = False
            self._queue = iter(self._key.permutation(self._epoch, self._rank, 0).tolist())
        return False

    def _next_reader(self) -> CountedReader | None:
        for stream_id in self._queue:
            stream = self.shape.streams[stream_id]
            slices = stream.slices if self.shape.shared else (stream.slices[self._rank],)
            num_picks = max(part.num_picks for part in slices)
            if num_picks:
                self._epoch_has_cells = True
                self._active[stream.modality] += 1
                return CountedReader(stream, slices, num_picks)
        return None
