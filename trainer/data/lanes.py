"""Cutting a stream into slices, and laying a slice's groups on lanes.

All of it is a pure function of the groups' lengths, the number of lanes and a priority per group, so every rank can
work out every other rank's plan without communication.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.keyed import IntArray


def cut_slices(cells: IntArray, num_slices: int) -> IntArray:
    """Cut groups into contiguous slices of about the same number of cells.

    Returns:
        int64 [num_slices + 1]: slice i holds the groups [bounds[i], bounds[i + 1]); each cut is at the group boundary
        nearest to its ideal place. A slice may be empty.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(cells, dtype=np.int64)])
    ideal = ends[-1] * np.arange(num_slices + 1) / num_slices
    right = np.minimum(np.searchsorted(ends, ideal), len(cells))
    left = np.maximum(right - 1, 0)
    bounds: IntArray = np.where(ideal - ends[left] < ends[right] - ideal, left, right).astype(np.int64)
    bounds[0], bounds[-1] = 0, len(cells)
    return bounds


def _next_slots(loads: IntArray, length: int, count: int) -> tuple[IntArray, IntArray]:
    """Where `count` groups of one length go, one after another, each to the lane with the least cells.

    Lane j offers the slots loads[j], loads[j] + length, ...; the groups take the `count` smallest, lower lanes first.
    A bisection finds the height below which at most `count` slots begin; the few that begin at it make up the rest.

    Returns:
        The lane of each group in turn (int64 [count]), and the new loads.
    """
    low, high = int(loads.min()), int(loads.min()) + count * length + 1
    while high - low > 1:
        middle = (low + high) // 2
        if int(np.maximum(-((loads - middle) // length), 0).sum()) <= count:
            low = middle
        else:
            high = middle
    taken = np.maximum(-((loads - low) // length), 0)
    at_height = np.flatnonzero(loads + taken * length == low)[: count - int(taken.sum())]
    taken[at_height] += 1
    lanes = np.repeat(np.arange(len(loads)), taken)
    turn = np.arange(count) - np.repeat(np.cumsum(taken) - taken, taken)
    order = np.lexsort((lanes, loads[lanes] + turn * length))
    return lanes[order], loads + taken * length


def assign_lanes(cells: IntArray, num_lanes: int) -> tuple[IntArray, IntArray]:
    """Give each group a lane, longest group first, always to the lane with the least cells.

    All groups of one length are placed together: a slice has few different lengths, and may have millions of groups.

    Returns:
        The lane of each group (int64 [n]) and the cells of each lane (int64 [num_lanes]); lanes are numbered by
        falling load, so that the lanes that still run form a prefix at any time.
    """
    order = np.argsort(-cells, kind="stable")
    lengths, begins = np.unique(-cells[order], return_index=True)
    lanes = np.empty(len(cells), dtype=np.int64)
    loads = np.zeros(num_lanes, dtype=np.int64)
    bounds = itertools.pairwise([*begins.tolist(), len(cells)])
    for length, (begin, end) in zip((-lengths).tolist(), bounds, strict=True):
        lanes[order[begin:end]], loads = _next_slots(loads, length, end - begin)
    by_load = np.argsort(-loads, kind="stable")
    rank = np.empty(num_lanes, dtype=np.int64)
    rank[by_load] = np.arange(num_lanes)
    return rank[lanes], loads[by_load]


def plan_length(cells: IntArray, num_lanes: int) -> int:
    """Batches that a plan over these groups has: the cells of its fullest lane, whatever the order of the groups."""
    return int(assign_lanes(cells, num_lanes)[1][0]) if len(cells) else 0


@dataclass(frozen=True)
class LanePlan:
    """The order in which a slice's cells are read.

    Args:
        cells: the stream's cell at (batch, lane), int64 [N, lanes]; -1 where a lane has ended.
        groups: the position of the cell's group among those that were planned, int64 [N, lanes]; -1 likewise.
        row_ends: cells read up to and including each batch, int64 [N].
    """

    cells: IntArray
    groups: IntArray
    row_ends: IntArray

    @property
    def num_batches(self) -> int:
        """N."""
        return len(self.row_ends)


def plan_lanes(
    first_cells: IntArray, num_cells: IntArray, priority: npt.NDArray[np.float64], num_lanes: int
) -> LanePlan:
    """Lay groups on lanes and cut the lanes into batches.

    Lanes are filled longest group first, which keeps them level; within a lane the groups follow their priority, so
    that a slice does not run from its long documents to its short ones. A group's cells stay in order on one lane.

    Args:
        first_cells: the stream's cell at which each group (still) begins, int64 [n].
        num_cells: its cells from there on, all > 0, int64 [n].
        priority: ascending is earlier, [n].
        num_lanes: most rows a batch.
    """
    by_priority = np.argsort(priority, kind="stable")
    first_cells, num_cells = first_cells[by_priority], num_cells[by_priority]
    lanes, loads = assign_lanes(num_cells, num_lanes)
    order = np.argsort(lanes, kind="stable")
    lanes, first_cells, num_cells = lanes[order], first_cells[order], num_cells[order]
    groups = by_priority[order]
    begins = np.cumsum(num_cells) - num_cells  # in the concatenation of all lanes
    total = int(num_cells.sum())
    within = np.arange(total) - np.repeat(begins, num_cells)
    lane_begins = np.cumsum(loads) - loads
    time = np.arange(total) - np.repeat(lane_begins[lanes], num_cells)
    cells = np.full((int(loads[0]) if total else 0, num_lanes), -1, dtype=np.int64)
    owners = cells.copy()
    lane = np.repeat(lanes, num_cells)
    cells[time, lane] = np.repeat(first_cells, num_cells) + within
    owners[time, lane] = np.repeat(groups, num_cells)
    return LanePlan(cells, owners, np.cumsum((cells >= 0).sum(axis=1), dtype=np.int64))
