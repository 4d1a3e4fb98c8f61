"""The draws of a run from its data, counted batch by batch before it starts.

`source_shape` measures the slices of a source from document lengths, without reading tokens. The number of batches and rows
in a slice does not depend on the order of the groups, since lanes are filled longest group first: it is the same in every
epoch, and known without drawing an order. `count_run` then runs the real blend, queue and pool with readers that count. Every
random choice of a run is a pure function of its seed and the batch index, so the counts are those of the run with this seed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.config.rules import mixing_of
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.epochs import QueueKey
from trainer.data.groups import CutOptions, OpenStream, StreamOpener
from trainer.data.mixing import ActivePool, PickMode
from trainer.data.reader import assign_lanes, cut_slices
from trainer.data.weights import WeightSpec, positions
from trainer.hashing import KeyedUniforms
from trainer.micro_batches import MicroBatches
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source

MAX_COUNTED = 200_000
"""Batches over all counted ranks, which take some seconds. The rest of a longer run is extrapolated."""
SAMPLED = 1 << 14  # batches of a piece of the run


@dataclass(frozen=True)
class SliceShape:
    """The slice of one rank: cells in each lane, descending, int64 [lanes], empty for a rank without any; and target tokens."""

    loads: Ints
    tokens: int

    @property
    def num_picks(self) -> int:
        """Number of batches."""
        return int(self.loads[0]) if len(self.loads) else 0

    @property
    def num_cells(self) -> int:
        """Number of rows of all batches."""
        return int(self.loads.sum())

    @cached_property
    def rows(self) -> Ints:
        """Rows of each batch, int64 [num_picks]: the lanes that are not exhausted."""
        times = np.arange(self.num_picks)
        return len(self.loads) - np.searchsorted(self.loads[::-1], times, side="right")


@dataclass(frozen=True)
class StreamShape:
    """One stream, cut into one slice per rank, in rank order. `behind_cuts`: tokens that follow a cut of their document."""

    modality: str
    batch_size: int
    slices: tuple[SliceShape, ...]
    behind_cuts: int = 0

    @property
    def shared_picks(self) -> int:
        """Batches of a pass in a shared pool: all ranks wait for the longest slice."""
        return max(part.num_picks for part in self.slices)


@dataclass(frozen=True)
class SourceShape:
    """One source: its streams by stream id, and how they are mixed. A custom `target` has no streams."""

    name: str
    streams: tuple[StreamShape, ...]
    num_mixed: int
    shared: bool
    repeat: bool = True

    @property
    def modalities(self) -> list[str]:
        """All modalities, sorted."""
        return sorted({stream.modality for stream in self.streams})

    def picks_per_slice(self) -> list[int]:
        """The number of batches of each pass over a slice, ascending, without empty ones."""
        if self.shared:
            found = [stream.shared_picks for stream in self.streams]
        else:
            found = [part.num_picks for stream in self.streams for part in stream.slices]
        return sorted(picks for picks in found if picks)

    def token_shares(self) -> list[float]:
        """Share of the source's tokens that each rank reads in an epoch. The deal is the same in both batching modes."""
        by_rank = [sum(part.tokens for part in own) for own in self._parts_by_rank()]
        return [tokens / sum(by_rank) for tokens in by_rank]

    def masked_shares(self, *, shared: bool) -> list[float]:
        """Share of each rank's micro-batches without a row, from this source, with a shared pool or pools of their own.

        With a shared pool, over an epoch: ranks wait for the longest slice of each stream. With pools of their own, a rank
        waits only if it has no cells at all, or, without `repeat`, until the last rank has finished.
        """
        picks = [sum(part.num_picks for part in own) for own in self._parts_by_rank()]
        if shared:
            total = sum(stream.shared_picks for stream in self.streams)
            return [1 - own / total for own in picks]
        if self.repeat:
            return [float(own == 0) for own in picks]
        return [1 - own / max(picks) for own in picks]

    def _parts_by_rank(self) -> Iterator[tuple[SliceShape, ...]]:
        return zip(*(stream.slices for stream in self.streams), strict=True)


def stream_shape(source: OpenStream, *, batch_size: int, world_size: int, turn: int) -> StreamShape:
    """The slices of an open stream on `world_size` ranks, with `batch_size` lanes each; rank `turn` has the first."""
    groups = source.groups
    tokens = groups.num_tokens(source.documents.lengths, source.seq_len)
    slices = []
    for start, stop in itertools.pairwise(cut_slices(groups.num_cells, world_size).tolist()):
        loads = assign_lanes(groups.num_cells[start:stop], batch_size)[1] if stop > start else np.zeros(0, np.int64)
        slices.append(SliceShape(loads[loads > 0], int(tokens[start:stop].sum())))
    first = -turn % world_size  # the slice of rank 0
    own = (*slices[first:], *slices[:first])
    return StreamShape(source.stream.modality, batch_size, own, source.tokens_behind_cuts[0])


def source_shape(plan: Plan, source: Source, world_size: int) -> SourceShape:
    """Open every stream of a source and measure its training split.

    Raises:
        UserError: a file cannot be read or is damaged, or there is no document to train on.
    """
    config, table, mixing = plan.config, source.table, mixing_of(plan.config, source.table)
    holdout = config.eval.holdout_fraction
    options = ReadOptions(plan.tokenizer, table.dtype, table.eod, table.text_split, table.format)
    cut = CutOptions(source.name, config.row_tokens, config.max_group_rows, "train", holdout)
    shared = mixing.batching_mode == "per_stream"
    turns = QueueKey(source.name, config.run.seed, len(source.streams), shared).turns
    shapes, opener = [], StreamOpener(options, cut, warns=False)
    for stream, turn in zip(source.streams, turns, strict=True) if not source.is_off else ():
        batch_size = mixing.batch_size_by_modality.get(stream.modality, mixing.batch_size)
        shapes.append(stream_shape(opener(stream), batch_size=batch_size, world_size=world_size, turn=turn))
    if shapes and not any(part.num_cells for shape in shapes for part in shape.slices):
        raise opener.nothing_left(f"source {source.name}", "has no document to train on")
    opener.warn()
    return SourceShape(source.name, tuple(shapes), mixing.num_streams_mixed, shared, mixing.repeat)


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
        self._tokens: list[float] = (tokens_per_row @ rows).tolist()

    @property
    def remaining_picks(self) -> int:
        """Number of batches left."""
        return self.num_picks - self.picks

    @property
    def remaining_fraction(self) -> float:
        """Fraction of the batches left; part of the reader protocol."""
        return self.remaining_picks / self.num_picks

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
    """

    batches: int = 0
    picks: Counter[str] = field(default_factory=Counter)
    exhausts: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    absent: Counter[str] = field(default_factory=Counter)
    waits: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))


class CountedMixing:
    """`StreamMixingDataset` with counts in place of tokens, which yields numbers of rows. A shared pool is that of rank 0."""

    def __init__(self, shape: SourceShape, pick_mode: PickMode, seed: int, rank: int) -> None:
        self.shape = shape
        self.tally = Tally()
        self.step = 1  # the optimizer step of the next batch, set by the caller
        self._rank = rank
        self._key = QueueKey(shape.name, seed, len(shape.streams), shape.shared)
        self._uniforms = KeyedUniforms("pick", shape.name, seed, "all" if shape.shared else rank)
        self._pool = ActivePool(shape.modalities, pick_mode)
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
        pool, tally, rows = self._pool, self.tally, 0
        if pool.readers or self._fill():
            slot = pool.pick(self._uniforms(tally.batches) if len(pool.readers) > 1 else 0.0)
            tally.absent.update(modality for modality in self.shape.modalities if not self._active[modality])
            rows = self._take(slot, pool.readers[slot])
        tally.batches += 1
        return {"dataset_labels": (), "rows": rows, "is_shared": self.shape.shared}

    def _take(self, slot: int, reader: CountedReader) -> int:
        tally, modality = self.tally, reader.stream.modality
        if reader.picks:
            tally.waits[modality][self.step - reader.last_step] += 1
        rows, tokens = reader.take()
        reader.last_step = self.step
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
                if not self.shape.repeat:
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


@dataclass(frozen=True)
class Forecast:
    """Counts of the first `num_batches` batches per rank.

    Attributes:
        is_whole: these are all batches of the run.
        ended_at: the batch at which no rank has data left, which ends the run; None: never.
        tallies: for each source, one tally per rank, or a single one if all ranks share a pool; none for a custom `target`,
            whose batches cannot be counted.
        cells_per_step: over all ranks and countable sources, int64 [steps].
    """

    num_batches: int
    is_whole: bool
    ended_at: int | None
    tallies: dict[str, list[Tally]]
    cells_per_step: Ints


def _uncounted() -> Iterator[dict[str, Any]]:
    """A custom `target`: endless batches of unknown content."""
    while True:
        yield {"dataset_labels": (), "rows": 0, "is_shared": True}


def count_run(plan: Plan, shapes: Sequence[SourceShape], world_size: int, *, most: int = MAX_COUNTED) -> Forecast:
    """Count what a run with this config and seed will draw, at most `most` batches over all ranks, but one step at least.

    Args:
        shapes: of the plan's sources, in order.
    """
    batches = plan.batches_by_steps
    ranks = range(1 if all(shape.shared or not shape.streams for shape in shapes) else world_size)
    steps = min(plan.config.train.steps, max(batches.step_of(most // len(ranks)) - 1, 1))
    cells = np.zeros(steps, dtype=np.int64)
    tallies: dict[str, list[Tally]] = {shape.name: [] for shape in shapes}
    ends = []
    for rank in ranks:
        parts = [
            CountedMixing(shape, mixing_of(plan.config, source.table).pick_mode, plan.config.run.seed, rank)
            if shape.streams
            else _uncounted()
            for source, shape in zip(plan.sources, shapes, strict=True)
        ]
        ended_here = _count_rank(plan, parts, cells, is_first=rank == 0)
        ends += [ended_here] if ended_here is not None else []
        for part in parts:
            if isinstance(part, CountedMixing) and (rank == 0 or not part.shape.shared):
                tallies[part.shape.name].append(part.tally)
    # Ranks without data run masked batches until no rank has any.
    ended_at = max(ends) if len(ends) == len(ranks) else None
    num_batches = batches.batches_before(steps + 1) if ended_at is None else ended_at
    is_whole = steps == plan.config.train.steps or ended_at is not None
    counted_steps = batches.step_of(num_batches - 1) if num_batches else 0
    return Forecast(num_batches, is_whole, ended_at, tallies, cells[:counted_steps])


def _count_rank(
    plan: Plan, parts: Sequence[CountedMixing | Iterator[dict[str, Any]]], cells: Ints, *, is_first: bool
) -> int | None:
    """Add the cells of one rank to `cells`; returns the batch at which the data ended, if it did."""
    batches = plan.batches_by_steps
    blend = BlendDataset(
        [BlendSource(source.name, part, source.weight) for source, part in zip(plan.sources, parts, strict=True)],
        seed=plan.config.run.seed,
        micro_batches=batches,
    )
    mixings = [part for part in parts if isinstance(part, CountedMixing)]
    for step in range(1, len(cells) + 1):
        for mixing in mixings:
            mixing.step = step
        for index in range(batches.batches_before(step), batches.batches_before(step + 1)):
            batch = next(blend, None)
            if batch is None:
                return index
            # The first rank counts the batches of a shared pool for all ranks.
            if is_first or not batch["is_shared"]:
                cells[step - 1] += batch["rows"]
    return None


def shares_at(weights: Sequence[WeightSpec], batches: Ints, micro_batches: MicroBatches) -> npt.NDArray[np.float64]:
    """The probability of each source at each batch, float64 [sources, batches]; zero where all weights are zero."""
    raw = np.array([spec.evaluate_many(positions(spec.unit, batches, micro_batches)) for spec in weights])
    total = raw.sum(axis=0)
    shares: npt.NDArray[np.float64] = np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)
    return shares


def expected_batches(weights: Sequence[WeightSpec], num_batches: int, micro_batches: MicroBatches) -> list[float]:
    """The expected number of micro-batches of each source: the sum of its probability over the run.

    Between two points of the schedules a probability is smooth: long pieces are sampled, so that any run takes as long.
    """
    edges = {0, num_batches}
    for spec in weights:
        edges |= {x if spec.unit == "batch" else micro_batches.batches_before(max(x, 1)) for x in spec.points}
    sums = np.zeros(len(weights))
    for start, end in itertools.pairwise(sorted(edge for edge in edges if edge <= num_batches)):
        count = min(end - start, SAMPLED)
        middles = start + (np.arange(count) + 0.5) * ((end - start) / count)
        sums += shares_at(weights, middles.astype(np.int64), micro_batches).mean(axis=1) * (end - start)
    return [float(total) for total in sums]
