"""How a stream's groups are dealt: to ranks in slices, in a slice to lanes."""

from __future__ import annotations

import itertools
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


def small(values: Ints) -> npt.NDArray[Any]:
    """The values as int16 if they fit: numpy radix-sorts those, ten times as fast."""
    return values.astype(np.int16) if len(values) and values.min() >= -(2**15) and values.max() < 2**15 else values


def assign_lanes(cells: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Assign each group, longest first, to the lane with the fewest cells.

    All groups of one length are placed together: a slice has few distinct lengths, but may have millions of groups.

    Returns:
        The lane of each group (int64 [n]) and the cells of each lane (int64 [num_lanes]). Lanes are numbered by
        decreasing load, so the lanes that still run are a prefix at any time.
    """
    order = np.argsort(small(-cells), kind="stable")
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
