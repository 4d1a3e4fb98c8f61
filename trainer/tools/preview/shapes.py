"""The number of batches and rows in the slice of each rank, computed from document lengths without reading tokens.

Neither depends on the order of the groups, since lanes are filled longest group first. Both are therefore the same in every
epoch, and known without drawing an order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainer.arrays import Ints
from trainer.config.rules import mixing_of
from trainer.data.documents import ReadOptions
from trainer.data.epochs import QueueKey
from trainer.data.groups import GroupTable
from trainer.data.lanes import assign_lanes, cut_slices
from trainer.data.mixing import BATCHING_MODES, BatchingMode
from trainer.data.open_stream import CutOptions, OpenStream, StreamOpener
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source


@dataclass(frozen=True)
class SliceShape:
    """The slice of one rank.

    Attributes:
        loads: number of cells in each lane, descending, int64 [lanes]; empty for a rank without cells.
        tokens: number of target tokens.
    """

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
    """One stream, cut into one slice per rank.

    Attributes:
        slices: in rank order.
        group_cells: number of groups of 0, 1, 2, ... cells, int64 [most + 1].
    """

    modality: str
    batch_size: int
    num_groups: int
    slices: tuple[SliceShape, ...]
    group_cells: Ints = field(default_factory=lambda: np.zeros(1, np.int64))

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

    def worst_masked_shares(self) -> dict[BatchingMode, float]:
        """The largest of `masked_shares` in each batching mode."""
        return {mode: max(self.masked_shares(shared=mode == "per_stream")) for mode in BATCHING_MODES}

    def _parts_by_rank(self) -> Iterator[tuple[SliceShape, ...]]:
        return zip(*(stream.slices for stream in self.streams), strict=True)


def group_tokens(groups: GroupTable, lengths: Ints, seq_len: int) -> Ints:
    """Number of target tokens of each group, int64 [G].

    Args:
        groups: of one stream.
        lengths: number of tokens of each of its documents, int64 [documents].
        seq_len: target tokens per cell.
    """
    left = lengths[groups.documents] - groups.first_cells * seq_len
    tokens = np.minimum(left, groups.num_cells * seq_len)
    segments = np.concatenate([[0], np.cumsum(lengths[groups.segment_documents])])
    packed = segments[groups.segment_offsets[1:]] - segments[groups.segment_offsets[:-1]]
    found: Ints = np.where(np.diff(groups.segment_offsets) > 0, packed, tokens)
    return found


def stream_shape(source: OpenStream, *, batch_size: int, world_size: int, turn: int) -> StreamShape:
    """The slices of an open stream on `world_size` ranks, with `batch_size` lanes each; rank `turn` has the first."""
    groups = source.groups
    tokens = group_tokens(groups, source.documents.lengths, source.seq_len)
    slices = []
    for start, stop in itertools.pairwise(cut_slices(groups.num_cells, world_size).tolist()):
        loads = assign_lanes(groups.num_cells[start:stop], batch_size)[1] if stop > start else np.zeros(0, np.int64)
        slices.append(SliceShape(loads[loads > 0], int(tokens[start:stop].sum())))
    first = -turn % world_size  # the slice of rank 0
    return StreamShape(
        source.stream.modality,
        batch_size,
        groups.num_groups,
        (*slices[first:], *slices[:first]),
        np.bincount(groups.num_cells, minlength=1),
    )


def source_shape(plan: Plan, source: Source, world_size: int) -> SourceShape:
    """Open every stream of a source and measure its training split.

    Raises:
        UserError: a file cannot be read or is damaged, or there is no document to train on.
    """
    config, table, mixing = plan.config, source.table, mixing_of(plan.config, source.table)
    data, holdout = config.data, config.eval.holdout_fraction
    options = ReadOptions(plan.tokenizer, table.dtype, table.eod, table.text_split)
    cut = CutOptions(source.name, config.row_tokens, config.max_group_rows, data.pack, "train", holdout)
    shared = mixing.batching_mode == "per_stream"
    turns = QueueKey(source.name, config.run.seed, len(source.streams), shared).turns
    shapes, opener = [], StreamOpener(format=table.format, options=options, cut=cut, warns=False)
    for stream, turn in zip(source.streams, turns, strict=True) if not source.is_off else ():
        batch_size = mixing.batch_size_by_modality.get(stream.modality, mixing.batch_size)
        shapes.append(stream_shape(opener(stream), batch_size=batch_size, world_size=world_size, turn=turn))
    if shapes and not any(part.num_cells for shape in shapes for part in shape.slices):
        raise opener.nothing_left(f"source {source.name}", "has no document to train on")
    opener.warn()
    return SourceShape(source.name, tuple(shapes), mixing.num_streams_mixed, shared, mixing.repeat)
