"""Readers: a stream is cut into slices, a slice's groups are laid on lanes, and a cursor gives the rows of each batch.

Plans are pure functions of the groups' lengths, the number of lanes and a priority per group, so every rank can compute every
other rank's plan without communication.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.arrays import Flags, Ints
from trainer.data.groups import GroupTable, OpenStream
from trainer.errors import UserError
from trainer.wording import printable


def check_size(source: OpenStream) -> None:
    """Refuse, before it is read from, a file that is shorter than it was: the pages of a mapped file that are cut off end
    the process at a touch (SIGBUS). A file that is gone stays readable where it is mapped."""
    try:
        size = os.stat(source.stream.tokens or source.stream.path).st_size
    except OSError:
        return
    if size < source.num_bytes:
        problem = f"was cut from {source.num_bytes} to {size} bytes during the run"
        raise UserError(printable(source.stream.path), problem, "put the file back, and resume")


def cut_slices(cells: Ints, num_slices: int) -> Ints:
    """Cut groups into contiguous slices of about the same number of cells.

    Returns:
        int64 [num_slices + 1]: slice i holds the groups [bounds[i], bounds[i + 1]); each cut is at the group boundary
        nearest to its ideal position. A slice may be empty.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(cells, dtype=np.int64)])
    ideal = ends[-1] * np.arange(num_slices + 1) / num_slices
    right = np.minimum(np.searchsorted(ends, ideal), len(cells))
    left = np.maximum(right - 1, 0)
    bounds: Ints = np.where(ideal - ends[left] < ends[right] - ideal, left, right).astype(np.int64)
    bounds[0], bounds[-1] = 0, len(cells)
    return bounds


def _next_slots(loads: Ints, length: int, count: int) -> tuple[Ints, Ints]:
    """Assign `count` groups of one length, one after another, each to the lane with the fewest cells.

    Lane j offers the slots loads[j], loads[j] + length, ...; the groups take the `count` smallest, lower lanes first.
    Once every lane has reached the fullest one, the lanes take turns in a repeating order.

    Returns:
        The lane of each group (int64 [count]), and the new loads.
    """
    num_lanes = len(loads)
    # No lane gets more than `count` groups; where this limit applies, all groups are placed before the turns begin.
    below = np.minimum(-((loads - loads.max()) // length), count)
    lanes = np.repeat(np.arange(num_lanes), below)
    turn = np.arange(len(lanes)) - np.repeat(np.cumsum(below) - below, below)
    head = lanes[np.lexsort((lanes, loads[lanes] + turn * length))][:count]
    cycle = np.lexsort((np.arange(num_lanes), loads + below * length))
    lanes = np.concatenate([head, np.resize(cycle, count - len(head))])
    return lanes, loads + np.bincount(lanes, minlength=num_lanes) * length


def _small(values: Ints) -> npt.NDArray[Any]:
    """The values as int16 if they fit: numpy radix-sorts those, ten times as fast."""
    return values.astype(np.int16) if len(values) and values.min() >= -(2**15) and values.max() < 2**15 else values


def assign_lanes(cells: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Assign each group, longest first, to the lane with the fewest cells.

    All groups of one length are placed together: a slice has few distinct lengths, but may have millions of groups.

    Returns:
        The lane of each group (int64 [n]) and the cells of each lane (int64 [num_lanes]). Lanes are numbered by
        decreasing load, so the lanes that still run are a prefix at any time.
    """
    order = np.argsort(_small(-cells), kind="stable")
    by_length = cells[order]
    begins = np.flatnonzero(np.diff(by_length, prepend=0)).tolist()  # where a new length begins; no length is 0
    lanes = np.empty(len(cells), dtype=np.int64)
    loads = np.zeros(num_lanes, dtype=np.int64)
    for begin, end in itertools.pairwise([*begins, len(cells)]):
        lanes[order[begin:end]], loads = _next_slots(loads, int(by_length[begin]), end - begin)
    by_load = np.argsort(-loads, kind="stable")
    rank = np.empty(num_lanes, dtype=np.int64)
    rank[by_load] = np.arange(num_lanes)
    return rank[lanes], loads[by_load]


def plan_length(cells: Ints, num_lanes: int) -> int:
    """Batches of a plan over these groups: the cells of its fullest lane, whatever the order of the groups."""
    return int(assign_lanes(cells, num_lanes)[1][0]) if len(cells) else 0


@dataclass(frozen=True)
class LanePlan:
    """The order in which a slice's cells are read: n groups, one after another on lanes.

    Only groups are stored, not their cells; `rows` computes the cells of some batches.

    Args:
        loads: cells of each lane, decreasing, int64 [lanes].
        order: the planned groups' positions, lane after lane in reading order, int64 [n].
        lanes: the lane of each, int64 [n].
        first_cells: the stream's cell at which each begins, int64 [n].
        begins: the batch at which each begins, int64 [n].
    """

    loads: Ints
    order: Ints
    lanes: Ints
    first_cells: Ints
    begins: Ints

    @property
    def num_batches(self) -> int:
        """Batches of the plan."""
        return int(self.loads[0]) if len(self.order) else 0

    def cells_before(self, batch: int) -> int:
        """Cells read before a batch, over all lanes."""
        return int(np.minimum(self.loads, batch).sum())

    def taken(self, num_cells: Ints, batches: int) -> Ints:
        """Cells of each group that the first `batches` batches read, by the groups' positions (as `num_cells`), int64 [n]."""
        taken = np.empty(len(self.order), dtype=np.int64)
        taken[self.order] = np.clip(batches - self.begins, 0, num_cells[self.order])
        return taken

    def rows(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """The cells that the batches [start, stop) read.

        Returns:
            The stream's cell at (batch, lane), and the position of its group among the planned ones; both int64
            [stop - start, lanes], -1 where a lane has ended.
        """
        times = np.arange(start, stop)[:, None]
        # One search over all lanes: the begins of each lane are shifted past those of the previous lane.
        stride = self.num_batches + 1
        wanted = times + np.arange(len(self.loads)) * stride
        at = np.searchsorted(self._keys, wanted.ravel(), side="right").reshape(wanted.shape) - 1
        runs = times < self.loads
        cells = np.where(runs, self.first_cells[at] + times - self.begins[at], -1)
        return cells, np.where(runs, self.order[at], -1)

    @cached_property
    def _keys(self) -> Ints:
        return self.begins + self.lanes * (self.num_batches + 1)


def plan_lanes(first_cells: Ints, num_cells: Ints, priority: npt.NDArray[np.float64], num_lanes: int) -> LanePlan:
    """Lay groups on lanes.

    Lanes are filled longest group first, which keeps them level. Within a lane groups follow their priority, so that a
    slice does not go from its long documents to its short ones. A group's cells stay in order on one lane.

    Args:
        first_cells: the stream's cell at which each group (still) begins, int64 [n].
        num_cells: its cells from there on, all > 0, int64 [n].
        priority: ascending is earlier, [n].
        num_lanes: most rows per batch.
    """
    by_priority = np.argsort(priority, kind="stable")
    lanes, loads = assign_lanes(num_cells[by_priority], num_lanes)
    by_lane = np.argsort(_small(lanes), kind="stable")
    lanes, order = lanes[by_lane], by_priority[by_lane]
    sizes = num_cells[order]
    lane_begins = np.cumsum(loads) - loads
    begins = np.cumsum(sizes) - sizes - lane_begins[lanes]
    return LanePlan(loads, order, lanes, first_cells[order], begins)


ROWS_BLOCK = 512  # batches whose rows are computed together


class Rows(NamedTuple):
    """The rows of one batch, B of them. The arrays are views of memory that no other batch shares.

    Attributes:
        owners: the stream's group of each row, int64 [B].
        group_ids: int64 [B].
        cell_index: int64 [B].
        windows: where each row's window (the token before its first target, and its targets) begins, int64 [B].
        is_last: bool [B].
        is_first: the row begins a document, bool [B].
        is_odd: its window is not entirely of one document, or extends past either end of the array, bool [B].
    """

    owners: Ints
    group_ids: Ints
    cell_index: Ints
    windows: Ints
    is_last: Flags
    is_first: Flags
    is_odd: Flags


def rows_of_batches(source: OpenStream, plan: LanePlan, groups: Ints, start: int, stop: int) -> list[Rows]:
    """The rows of the batches [start, stop) of a plan, computed together so that each batch costs a few slices.

    Args:
        plan: lays groups on L lanes.
        groups: the stream's group at each position that the plan counts, int64.
    """
    table, documents = source.groups, source.documents
    cells, positions = plan.rows(start, stop)
    owners = groups[positions]  # [N, L]; arbitrary where a lane has ended
    cell_index = cells - table.cell_offsets[owners]
    first_cells, owner_documents = table.first_cells[owners], table.documents[owners]
    is_first = (cell_index == 0) & (first_cells == 0)
    windows = np.zeros_like(owners)
    is_odd = np.zeros(is_first.shape, dtype=np.bool_)
    if source.windows is not None:
        begins = documents.starts[owner_documents]
        wanted = begins + (first_cells + cell_index) * source.seq_len - 1
        windows = wanted.clip(0, len(source.windows) - 1)
        left = begins + documents.lengths[owner_documents] - (wanted + 1)
        is_odd = (left < source.seq_len) | (windows != wanted)
    is_last = cell_index == table.num_cells[owners] - 1
    columns: tuple[Any, ...] = (owners, table.ids_of(owners), cell_index, windows, is_last, is_first, is_odd)
    sizes: list[int] = (cells >= 0).sum(axis=1).tolist()  # lanes end one by one; those that still run come first
    return [Rows(*(column[batch, :size] for column in columns)) for batch, size in enumerate(sizes)]


@dataclass(frozen=True)
class PastReads:
    """How far one world read a stream in an epoch, before the stream was cut again for another world.

    Args:
        batch_size: lanes it was read on.
        picks: batches that had been taken of each slice; -1: the whole slice.
    """

    batch_size: int
    picks: tuple[int, ...]


@dataclass(frozen=True)
class Remainder:
    """The unread part of a stream: its unfinished groups, ascending; see `plan_lanes`, all [n]."""

    groups: Ints
    first_cells: Ints
    num_cells: Ints
    priority: npt.NDArray[np.float64]

    def plan(self, start: int, stop: int, num_lanes: int) -> LanePlan:
        """The plan for the groups [start, stop) of this remainder."""
        part = slice(start, stop)
        return plan_lanes(self.first_cells[part], self.num_cells[part], self.priority[part], num_lanes)

    def after(self, reads: PastReads, num_groups: int) -> Remainder:
        """What is left once a world has read from each slice; begun groups continue where they stopped, and come first.

        `reads` are of a world that was given this remainder; `num_groups` counts the whole stream.
        """
        bounds = cut_slices(self.num_cells, len(reads.picks)).tolist()
        taken = np.zeros(num_groups, dtype=np.int64)
        for start, stop, picks in zip(bounds[:-1], bounds[1:], reads.picks, strict=True):
            if picks < 0:
                taken[self.groups[start:stop]] = self.num_cells[start:stop]
            elif picks > 0 and stop > start:
                plan = self.plan(start, stop, reads.batch_size)
                taken[self.groups[start:stop]] = plan.taken(self.num_cells[start:stop], picks)
        taken = taken[self.groups]
        left = taken < self.num_cells
        # Drawn priorities lie in [0, 1): subtracting 1 puts begun groups first and keeps their order.
        priority = np.where((taken > 0) & (self.priority >= 0), self.priority - 1.0, self.priority)
        return Remainder(
            self.groups[left], (self.first_cells + taken)[left], (self.num_cells - taken)[left], priority[left]
        )


def remaining_stream(groups: GroupTable, generator: np.random.Generator, reads: Sequence[PastReads]) -> Remainder:
    """What is left of a stream after `reads`, by one world after another; the generator draws the order of groups."""
    num_groups = groups.num_groups
    remainder = Remainder(
        np.arange(num_groups), groups.cell_offsets[:-1], groups.num_cells, generator.random(num_groups)
    )
    for each in reads:
        remainder = remainder.after(each, num_groups)
    return remainder


class StreamReader:
    """A cursor over the slice of a stream that one rank reads in one pass.

    `slice_start`, `position` and `slice_end` count cells in the order of the stream's (remaining) cells: `position` is
    `slice_start` plus the cells read so far. `remaining_picks`, the batches left until the reader is exhausted, is
    exact: those left in the longest plan over the ranks that follow this cursor. `ceil((slice_end - position) / bs)`
    equals it while all lanes are level; towards the end of a slice of long groups fewer lanes run, and the plan has
    more batches than that. Exactness is what makes picks in proportion to it a uniform permutation of all remaining
    batches.

    Args:
        remainder: the stream's unread part in this epoch, over all ranks.
        bs: lanes, the most cells per pick.
        slice_index, num_slices: which slice is read, of as many as there are ranks.
        shared: all ranks pick this stream together (`per_stream`): it is exhausted when the longest slice is.
        picks: batches that were taken before, by the reader that this one continues.
    """

    def __init__(
        self,
        source: OpenStream,
        remainder: Remainder,
        *,
        bs: int,
        slice_index: int,
        num_slices: int,
        shared: bool,
        picks: int = 0,
    ) -> None:
        self.source = source
        self.stream = source.stream
        self.stream_id = source.stream.stream_id
        bounds = cut_slices(remainder.num_cells, num_slices).tolist()
        self._plan = plan = remainder.plan(bounds[slice_index], bounds[slice_index + 1], bs)
        self._groups = remainder.groups[bounds[slice_index] : bounds[slice_index + 1]]
        self._num_own_picks = plan.num_batches
        self.num_picks = plan.num_batches
        if shared:
            others = [pair for other, pair in enumerate(itertools.pairwise(bounds)) if other != slice_index]
            lengths = [plan_length(remainder.num_cells[start:stop], bs) for start, stop in others]
            self.num_picks = max([plan.num_batches, *lengths])
        assert 0 <= picks <= self.num_picks, (picks, self.num_picks)
        self.slice_start = int(remainder.num_cells[: bounds[slice_index]].sum())
        self.slice_end = int(remainder.num_cells[: bounds[slice_index + 1]].sum())
        self.position = self.slice_start + plan.cells_before(picks)
        self.picks = picks
        self.remaining_picks = self.num_picks - picks
        self._slice_cells = max(self.slice_end - self.slice_start, 1)
        self.remaining_fraction = (self.slice_end - self.position) / self._slice_cells
        self._prepare(picks)

    def _prepare(self, start: int) -> None:
        """Compute the rows of the next block of batches, so that taking one is a look-up."""
        stop = min(start + ROWS_BLOCK, self._num_own_picks)
        self._rows = rows_of_batches(self.source, self._plan, self._groups, start, stop) if start < stop else []
        self._rows_start, self._rows_stop = start, stop

    def take(self) -> Rows | None:
        """The rows of the next batch; None if only other ranks' slices have batches left.

        Raises:
            UserError: the stream's file was cut.
        """
        index = self.picks
        assert self.remaining_picks, "an exhausted reader was picked"
        self.picks = index + 1
        self.remaining_picks -= 1
        if index >= self._num_own_picks:
            return None
        check_size(self.source)
        if index >= self._rows_stop:
            self._prepare(index)
        rows = self._rows[index - self._rows_start]
        self.position += len(rows.owners)
        self.remaining_fraction = (self.slice_end - self.position) / self._slice_cells
        return rows
