"""What each rank's slice of each stream holds, counted from the documents' lengths: no token is looked at twice.

How many batches a slice gives, and how many rows each has, does not depend on the order of its groups: lanes are filled
longest group first. So both are the same in every epoch, and a preview knows them without drawing anything.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.arrays import Ints
from trainer.config.rules import mixing_of
from trainer.data.formats.documents import ReadOptions
from trainer.data.streams.groups import GroupTable
from trainer.data.streams.lanes import assign_lanes, cut_slices
from trainer.data.streams.open_stream import CutOptions, OpenStream, open_stream
from trainer.errors import UserError
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source


@dataclass(frozen=True)
class SliceShape:
    """One rank's slice of a stream.

    Args:
        loads: cells of each lane, falling, int64 [lanes]; empty where nothing falls to the rank.
        tokens: target tokens of the slice.
    """

    loads: Ints
    tokens: int

    @property
    def num_picks(self) -> int:
        """Batches that it gives."""
        return int(self.loads[0]) if len(self.loads) else 0

    @property
    def num_cells(self) -> int:
        """Rows of all its batches."""
        return int(self.loads.sum())

    @cached_property
    def rows(self) -> Ints:
        """Rows of each of its batches, int64 [num_picks]: the lanes that still run."""
        times = np.arange(self.num_picks)
        return len(self.loads) - np.searchsorted(self.loads[::-1], times, side="right")


@dataclass(frozen=True)
class StreamShape:
    """One stream, cut into a slice a rank."""

    modality: str
    batch_size: int
    num_groups: int
    slices: tuple[SliceShape, ...]

    @property
    def shared_picks(self) -> int:
        """Batches of a pass that all ranks make together: those of the longest slice."""
        return max(part.num_picks for part in self.slices)


@dataclass(frozen=True)
class SourceShape:
    """One source: its streams by stream id, and how they are mixed. A `target` of the user's own has no streams."""

    name: str
    streams: tuple[StreamShape, ...]
    num_mixed: int
    shared: bool

    @property
    def modalities(self) -> list[str]:
        """All labels, sorted."""
        return sorted({stream.modality for stream in self.streams})

    def picks_per_slice(self) -> list[int]:
        """Batches of every pass over a slice that has any, ascending."""
        if self.shared:
            found = [stream.shared_picks for stream in self.streams]
        else:
            found = [part.num_picks for stream in self.streams for part in stream.slices]
        return sorted(picks for picks in found if picks)


def group_tokens(groups: GroupTable, lengths: Ints, seq_len: int) -> Ints:
    """Target tokens of each group, int64 [G].

    Args:
        groups: of one stream.
        lengths: tokens of all its documents, int64.
        seq_len: target tokens a cell.
    """
    left = lengths[groups.documents] - groups.first_cells * seq_len
    tokens = np.minimum(left, groups.num_cells * seq_len)
    segments = np.concatenate([[0], np.cumsum(lengths[groups.segment_documents])])
    packed = segments[groups.segment_offsets[1:]] - segments[groups.segment_offsets[:-1]]
    found: Ints = np.where(np.diff(groups.segment_offsets) > 0, packed, tokens)
    return found


def stream_shape(source: OpenStream, *, batch_size: int, world_size: int) -> StreamShape:
    """How the slices of an open stream look on `world_size` ranks with `batch_size` lanes each."""
    groups = source.groups
    tokens = group_tokens(groups, source.documents.lengths, source.seq_len)
    slices = []
    for start, stop in itertools.pairwise(cut_slices(groups.num_cells, world_size).tolist()):
        loads = assign_lanes(groups.num_cells[start:stop], batch_size)[1] if stop > start else np.zeros(0, np.int64)
        slices.append(SliceShape(loads[loads > 0], int(tokens[start:stop].sum())))
    return StreamShape(source.stream.modality, batch_size, groups.num_groups, tuple(slices))


def source_shape(plan: Plan, source: Source, world_size: int) -> SourceShape:
    """Open every stream of a source and measure it; the training split alone.

    Raises:
        UserError: a file cannot be read or is damaged.
    """
    config, mixing = plan.config, mixing_of(plan.config, source.table)
    options = ReadOptions(plan.tokenizer, source.table.dtype, source.table.eod)
    cut = CutOptions(
        source.name,
        config.data.seq_len,
        config.data.max_group_cells,
        config.data.pack,
        "train",
        config.eval.holdout_fraction,
    )
    shapes = tuple(
        stream_shape(
            open_stream(stream, format=source.table.format, options=options, cut=cut),
            batch_size=mixing.batch_size_by_modality.get(stream.modality, mixing.batch_size),
            world_size=world_size,
        )
        for stream in source.streams
    )
    if shapes and not any(part.num_cells for shape in shapes for part in shape.slices):
        raise UserError(f"source {source.name}", "has no document to train on", "change holdout_fraction or the paths")
    return SourceShape(source.name, shapes, mixing.num_streams_mixed, mixing.batching_mode == "per_stream")
