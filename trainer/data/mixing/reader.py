"""Readers: cursors over one rank's slice of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.keyed import IntArray
from trainer.data.streams.groups import GroupTable
from trainer.data.streams.lanes import LanePlan, cut_slices, plan_lanes, plan_length
from trainer.data.streams.open_stream import OpenStream, Rows, RowTable


@dataclass(frozen=True)
class Progress:
    """How far one world read a stream in an epoch, before it was cut anew for another.

    Args:
        batch_size: lanes it was read on.
        picks: batches that each of its ranks had taken; -1: all of its slice.
    """

    batch_size: int
    picks: tuple[int, ...]


@dataclass(frozen=True)
class Remainder:
    """What is left of a stream: for each group that is not finished, where it goes on.

    Args:
        groups: indices of the groups, ascending, int64 [n].
        first_cells: the stream's cell at which each goes on, int64 [n].
        num_cells: cells from there to the group's end, all > 0, int64 [n].
        priority: ascending is earlier, [n].
    """

    groups: IntArray
    first_cells: IntArray
    num_cells: IntArray
    priority: npt.NDArray[np.float64]

    def plan(self, start: int, stop: int, num_lanes: int) -> LanePlan:
        """The plan for the groups [start, stop) of this remainder."""
        part = slice(start, stop)
        return plan_lanes(self.first_cells[part], self.num_cells[part], self.priority[part], num_lanes)


def whole_stream(groups: GroupTable, generator: np.random.Generator) -> Remainder:
    """All groups, from their beginnings, in an order drawn from the generator."""
    return Remainder(
        np.arange(groups.num_groups), groups.cell_offsets[:-1], groups.num_cells, generator.random(groups.num_groups)
    )


def after_progress(groups: GroupTable, before: Remainder, progress: Progress) -> Remainder:
    """What is left after a world read some of each slice; begun groups go on where they stopped, and come first."""
    bounds = cut_slices(before.num_cells, len(progress.picks)).tolist()
    taken = np.zeros(groups.num_groups, dtype=np.int64)
    for start, stop, picks in zip(bounds[:-1], bounds[1:], progress.picks, strict=True):
        if picks < 0:
            taken[before.groups[start:stop]] = before.num_cells[start:stop]
        elif picks > 0 and stop > start:
            plan = before.plan(start, stop, progress.batch_size)
            taken[before.groups[start:stop]] = plan.taken(before.num_cells[start:stop], picks)
    taken = taken[before.groups]
    left = taken < before.num_cells
    # Uniform priorities lie in [0, 1): subtracting 1 puts begun groups first and keeps their order.
    priority = np.where((taken > 0) & (before.priority >= 0), before.priority - 1.0, before.priority)
    return Remainder(
        before.groups[left], (before.first_cells + taken)[left], (before.num_cells - taken)[left], priority[left]
    )


class StreamReader:
    """A cursor over the slice of a stream that one rank reads in one pass.

    `slice_start`, `position` and `slice_end` count cells in the stream's (remaining) cell order: `position` is
    `slice_start` plus the cells read so far. `remaining_picks`, the batches left until the reader is exhausted, is
    exact: those that the longest plan over the ranks that follow this cursor still has.
    `ceil((slice_end - position) / bs)` equals it while all lanes are level; towards the end of a slice of long groups
    fewer lanes run, and the plan has more batches than that. Being exact is what makes picks in proportion to it a
    uniform permutation of all remaining batches.

    Args:
        source: the open stream.
        remainder: what is left of it in this epoch, over all ranks.
        bs: lanes, the most cells a pick gives.
        rank, world_size: which slice is read.
        shared: all ranks pick this stream together (`per_stream`): it is exhausted when the longest slice is.
    """

    def __init__(
        self, source: OpenStream, remainder: Remainder, *, bs: int, rank: int, world_size: int, shared: bool
    ) -> None:
        self.source = source
        self.stream = source.stream
        self.stream_id = source.stream.stream_id
        self.path = source.stream.path
        self.bs = bs
        bounds = cut_slices(remainder.num_cells, world_size).tolist()
        self._plan = plan = remainder.plan(bounds[rank], bounds[rank + 1], bs)
        self._rows = RowTable(source, plan, remainder.groups[bounds[rank] : bounds[rank + 1]])
        self._num_own_picks = plan.num_batches
        self.num_picks = plan.num_batches
        if shared:
            others = [pair for other, pair in enumerate(itertools.pairwise(bounds)) if other != rank]
            lengths = [plan_length(remainder.num_cells[start:stop], bs) for start, stop in others]
            self.num_picks = max([plan.num_batches, *lengths])
        self.slice_start = int(remainder.num_cells[: bounds[rank]].sum())
        self.slice_end = int(remainder.num_cells[: bounds[rank + 1]].sum())
        self.position = self.slice_start
        self.picks = 0
        self.remaining_picks = self.num_picks
        self._slice_cells = max(self.slice_end - self.slice_start, 1)

    @property
    def remaining_fraction(self) -> float:
        """Share of this rank's slice that is not read yet."""
        return (self.slice_end - self.position) / self._slice_cells

    def take(self) -> Rows | None:
        """The rows of the next batch; None if only other ranks' slices still have some."""
        index = self.picks
        assert self.remaining_picks, "an exhausted reader was picked"
        self.picks = index + 1
        self.remaining_picks -= 1
        if index >= self._num_own_picks:
            return None
        rows = self._rows.batch(index)
        self.position += len(rows.owners)
        return rows

    def skip_to(self, picks: int) -> None:
        """Go on as if `picks` batches had been taken."""
        assert 0 <= picks <= self.num_picks, (picks, self.num_picks)
        self.picks = picks
        self.remaining_picks = self.num_picks - picks
        self.position = self.slice_start + self._plan.cells_before(picks)


def remaining_stream(groups: GroupTable, generator: np.random.Generator, progress: Sequence[Progress]) -> Remainder:
    """What is left of a stream after the worlds in `progress`, one after another, read from it."""
    remainder = whole_stream(groups, generator)
    for each in progress:
        remainder = after_progress(groups, remainder, each)
    return remainder
