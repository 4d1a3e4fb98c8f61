"""The rows of states on the device, and which of them are valid. Slots are numbers here; nothing knows whose they are.

No call waits for the device: whether a row is finite is decided, stored and acted upon there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import Flags, Ints


class Slab:
    """One row and one flag per slot. Slot `capacity` stands for none: it reads as zeros, and is not valid.

    Args:
        width: numbers per state.
        capacity: number of slots.
        device, dtype: of the rows.
    """

    def __init__(self, *, width: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width = width
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        # Written with rows that are not kept, never read. Copying a whole batch costs less than selecting rows first.
        self.waste_slot = capacity + 1
        self._rows = torch.zeros(capacity + 2, width, device=device, dtype=dtype)
        self._is_valid = torch.zeros(capacity + 2, device=device, dtype=torch.bool)
        # Read where there is no state: zeros, and not valid.
        self._no_slot = torch.full((), capacity, device=device)
        # So small that a sum of `width` finite numbers times this is finite; infinity and NaN stay what they are.
        self._weights = torch.full((width,), torch.finfo(dtype).tiny / width, device=device, dtype=dtype)

    def read(self, slots: Ints) -> tuple[Tensor, Tensor]:
        """Copy rows out.

        Returns:
            The rows of `slots`, [len(slots), width], zeros where not valid; and which are valid, bool [len(slots)].
        """
        index = to_device(slots, self.device)
        is_valid = self._is_valid.index_select(0, index)
        # Redirecting the index costs a tenth of masking the rows.
        return self._rows.index_select(0, torch.where(is_valid, index, self._no_slot)), is_valid

    def write(self, slots: Ints, rows: Tensor) -> Tensor:
        """Copy rows in; those that are not finite are not valid.

        Args:
            slots: int64 [n], distinct but for `waste_slot`.
            rows: [n, width], of the slab's device and dtype, without a gradient.

        Returns:
            Which rows are valid, bool [n].
        """
        index = to_device(slots, self.device)
        # One pass over the rows; `isfinite().all(1)` takes ten times as long. With `out`, autocast leaves the dtype alone.
        sums = torch.mv(rows, self._weights, out=rows.new_empty(rows.shape[0]))
        is_valid = sums.abs() < torch.inf
        self._rows.index_copy_(0, index, rows)
        self._is_valid.index_copy_(0, index, is_valid)
        return is_valid

    def restore(self, slots: Ints, rows: Tensor, is_valid: Tensor) -> None:
        """Copy rows and flags of a checkpoint in; tensors of any device."""
        index = to_device(slots, self.device)
        self._rows.index_copy_(0, index, rows.to(self.device, self.dtype))
        self._is_valid.index_copy_(0, index, is_valid.to(self.device))


class InvalidCount:
    """Counts rows that are not valid, on the device. `read` waits for it, `add` does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._batches: list[tuple[Tensor, Flags]] = []

    def add(self, is_valid: Tensor, is_counted: Flags) -> None:
        """Count the rows that are not valid, bool [n], of those that are to be counted, bool [n]."""
        self._batches.append((is_valid, is_counted))
        # Many at once: each operation costs more than its few numbers.
        if len(self._batches) == 256:
            self._fold()

    def read(self) -> int:
        """The count so far."""
        self._fold()
        return int(self._sum)

    def reset(self) -> None:
        """Start again from zero."""
        self._batches.clear()
        self._sum.zero_()

    def _fold(self) -> None:
        if self._batches:
            is_valid, is_counted = zip(*self._batches, strict=True)
            self._sum += (to_device(np.concatenate(is_counted), self._device) & ~torch.cat(is_valid)).sum()
            self._batches.clear()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `array` on the device; pinned for CUDA, since a copy from pageable memory would block the host."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
