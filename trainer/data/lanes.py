"""Cutting a stream into slices, and laying a slice's groups on lanes.

All of it is a pure function of the groups' lengths, the number of lanes and a priority per group, so every rank can
work out every other rank's plan without communication.
"""

from __future__ import annotations

import heapq
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


def assign_lanes(cells: IntArray, num_lanes: int) -> tuple[IntArray, IntArray]:
    """Give each group a lane, longest group first, always to the lane with the least cells.

    Returns:
        The lane of each group (int64 [n]) and the cells of each lane (int64 [num_lanes]); lanes are numbered by
        falling load, so that the lanes that still run form a prefix at any time.
    """
    order = np.argsort(-cells, kind="stable")
    heap = [(0, lane) for lane in range(num_lanes)]
    lanes = np.empty(len(cells), dtype=np.int64)
    for group, length in zip(order.tolist(), cells[order].tolist(), strict=True):
        load, lane = heap[0]
        lanes[group] = lane
        heapq.heapreplace(heap, (load + length, lane))
    loads = np.zeros(num_lanes, dtype=np.int64)
    for load, lane in heap:
        loads[lane] = load
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
        row_ends: cells read up to and including each batch, int64 [N].
    """

    cells: IntArray
    row_ends: IntArray

    @property
    def num_batches(self) -> int:
        """N."""
        return len(self.row_ends)

    def batch(self, index: int) -> IntArray:
        """The stream's cells in a batch, one a lane that still runs."""
        rows = self.row_ends[index] - (self.row_ends[index - 1] if index else 0)
        return self.cells[index, :rows]


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
    begins = np.cumsum(num_cells) - num_cells  # in the concatenation of all lanes
    total = int(num_cells.sum())
    within = np.arange(total) - np.repeat(begins, num_cells)
    lane_begins = np.cumsum(loads) - loads
    time = np.arange(total) - np.repeat(lane_begins[lanes], num_cells)
    cells = np.full((int(loads[0]) if total else 0, num_lanes), -1, dtype=np.int64)
    cells[time, np.repeat(lanes, num_cells)] = np.repeat(first_cells, num_cells) + within
    return LanePlan(cells, np.cumsum((cells >= 0).sum(axis=1), dtype=np.int64))
