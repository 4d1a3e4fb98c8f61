"""Cutting a stream into slices, and laying a slice's groups on lanes.

Plans are pure functions of the groups' lengths, the number of lanes and a priority per group, so every rank can compute
every other rank's plan without communication.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints


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


def _argsort(priority: npt.NDArray[np.float64]) -> Ints:
    """A stable argsort. The fast unstable one suffices if no two priorities are equal, which is almost certain."""
    order = np.argsort(priority)
    in_order = priority[order]
    return np.argsort(priority, kind="stable") if (in_order[1:] == in_order[:-1]).any() else order


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
    by_priority = _argsort(priority)
    lanes, loads = assign_lanes(num_cells[by_priority], num_lanes)
    by_lane = np.argsort(_small(lanes), kind="stable")
    lanes, order = lanes[by_lane], by_priority[by_lane]
    sizes = num_cells[order]
    lane_begins = np.cumsum(loads) - loads
    begins = np.cumsum(sizes) - sizes - lane_begins[lanes]
    return LanePlan(loads, order, lanes, first_cells[order], begins)
