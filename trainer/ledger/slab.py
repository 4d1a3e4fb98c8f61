"""The rows of states on the device, and which of them are valid. Slots are numbers here; nothing knows whose they are.

No call waits for the device: whether a row is finite is decided, stored and acted upon there.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import Ints


class Slab:
    """One row per slot, `[capacity + 3, width]`, and a flag per slot. The three slots beyond the capacity are constants.

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
        # Read for a group that is not held: zeros, and invalid.
        self.missing_slot = capacity
        # Read where a state begins at zero by rule: zeros, and valid.
        self.blank_slot = capacity + 1
        # Written with rows that are not kept, never read. Copying a whole batch costs less than selecting rows first.
        self.waste_slot = capacity + 2
        self._rows = torch.zeros(capacity + 3, width, device=device, dtype=dtype)
        self._is_invalid = torch.zeros(capacity + 3, device=device, dtype=torch.bool)
        self._is_invalid[self.missing_slot].fill_(True)
        self._missing = torch.full((), self.missing_slot, device=device)

    def read(self, slots: Ints) -> tuple[Tensor, Tensor]:
        """Copy rows out.

        Returns:
            The rows of `slots`, [len(slots), width], zeros where invalid; and which are invalid, bool [len(slots)].
        """
        index = to_device(slots, self.device)
        is_invalid = self._is_invalid.index_select(0, index)
        # Redirecting the index costs a tenth of masking the rows.
        return self._rows.index_select(0, torch.where(is_invalid, self._missing, index)), is_invalid

    def write(self, slots: Ints, rows: Tensor) -> Tensor:
        """Copy rows in, and mark those that are not finite as invalid.

        Args:
            slots: int64 [n], distinct but for `waste_slot`.
            rows: [n, width], of the slab's device and dtype, without a gradient.

        Returns:
            How many rows are invalid, those for `waste_slot` not counted, [] int64 on the device.
        """
        index = to_device(slots, self.device)
        # The maximum propagates NaN, and NaN is not below infinity. A fifth of the time of `isfinite().all(1)`.
        is_invalid = ~(rows.abs().amax(1) < torch.inf)
        self._rows.index_copy_(0, index, rows)
        self._is_invalid.index_copy_(0, index, is_invalid)
        return (is_invalid & (index < self.waste_slot)).sum()

    def restore(self, slots: Ints, rows: Tensor, is_valid: Tensor) -> None:
        """Copy rows and flags of a checkpoint in; tensors of any device."""
        index = to_device(slots, self.device)
        self._rows.index_copy_(0, index, rows.to(self.device, self.dtype))
        self._is_invalid.index_copy_(0, index, ~is_valid.to(self.device))


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `array` on the device; pinned for CUDA, since a copy from pageable memory would block the host."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
