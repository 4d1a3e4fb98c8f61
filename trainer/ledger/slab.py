"""The rows of states, on the device, and copies to and from them. Nothing here knows whose they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Numbers that numpy does not know are moved as whole numbers of their size.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Slab:
    """A preallocated slab `[capacity + 2, width]`: a row a slot, a row that is never written and reads as zeros, and a
    row that is never read, for what is not kept: writing all rows of a batch there costs less than picking some.

    Args:
        width: numbers per state.
        capacity: number of slots.
        device, dtype: of the slab.
    """

    def __init__(self, *, width: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width = width
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        self.rows = torch.zeros(capacity + 2, width, device=device, dtype=dtype)
        self._carrier = None if _is_known_to_numpy(dtype) else _CARRIERS[dtype.itemsize]
        # On the CPU rows are copied by numpy, which takes two thirds of the time of `index_select` and `index_copy_`.
        self._cpu_rows: NDArray[Any] | None = None
        if device.type == "cpu":
            self._cpu_rows = (self.rows if self._carrier is None else self.rows.view(self._carrier)).numpy()

    @property
    def waste_slot(self) -> int:
        """Where rows are written that are not kept."""
        return self.capacity + 1

    def read(self, slots: Ints) -> Tensor:
        """The rows of `slots`, [len(slots), width], copied; zeros for slot `capacity`."""
        if self._cpu_rows is not None:
            rows = torch.from_numpy(self._cpu_rows.take(slots, 0))
            return rows if self._carrier is None else rows.view(self.dtype)
        return self.rows.index_select(0, self._index(slots))

    def write(self, slots: Ints, rows: Tensor) -> None:
        """Copy `rows`, of the slab's device and dtype and without a gradient, into `slots`, distinct but for `waste_slot`."""
        if self._cpu_rows is not None:
            self._cpu_rows[slots] = (rows if self._carrier is None else rows.view(self._carrier)).numpy()
        else:
            self.rows.index_copy_(0, self._index(slots), rows)

    def _index(self, slots: Ints) -> Tensor:
        return to_device(slots, self.device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `array` on the device, which the host does not wait for: a copy from pageable memory would make it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _is_known_to_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True
