"""The rows of states on the device, and which of them are valid; slots are numbers here.

No call waits for the device: whether a row is finite is decided, stored and acted upon there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import Ints
from trainer.on_device import to_device

Native = Any
"""An array of the library that a slab works with: numpy's or torch's."""

PIECE_BYTES = 64 * 2**20  # of rows that are copied together for a checkpoint
NUMPY_DTYPES = (torch.float16, torch.float32, torch.float64)


class Slab:
    """One row of `width` numbers and one flag per slot. Slot `capacity` stands for none: it reads
    as zeros, and is not valid.

    The same lines run on every device, on torch tensors, or on the CPU on numpy arrays that share
    the tensors' memory: torch's operations on few numbers take several times as long there.
    """

    def __init__(self, *, width: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width = width
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        # Takes the rows that are not kept and is never read: copying a whole batch costs less than
        # selecting rows first.
        self.waste_slot = capacity + 1
        self.library: Any = torch
        if device.type == "cpu" and dtype in NUMPY_DTYPES:
            self.library = np
        self._rows = self.native(self._allocate())
        self._is_valid = self.native(torch.zeros(capacity + 2, device=device, dtype=torch.bool))
        # A number of the host would have to be copied to the device each time, which waits.
        self._no_slot = self.native(torch.full((), capacity, device=device))

    def read(self, slots: Ints) -> tuple[Tensor, Native]:
        """Copies of the rows of `slots`, [n, width], zeros where not valid; and which are, [n]."""
        index = self.native(slots)
        is_valid = self._is_valid[index]
        # Redirecting the index costs a tenth of masking the rows.
        safe = self.library.where(is_valid, index, self._no_slot)
        return torch.as_tensor(self._rows[safe]), is_valid

    def are_valid(self, slots: Ints) -> Tensor:
        """Which rows of `slots` are states, bool [n]."""
        return torch.as_tensor(self._is_valid[self.native(slots)])

    def write(self, slots: Ints, rows: Tensor) -> Native:
        """Copy rows [n, width] in, of the slab's device and dtype, without a gradient; those that
        are not finite are not valid. `slots` are distinct but for `waste_slot`.

        Returns how many rows, without those of `waste_slot`, are not valid: a number, or a tensor
        [] of the device.
        """
        index, given = self.native(slots), self.native(rows)
        is_valid = self.library.isfinite(given).all(1)
        self._is_valid[index] = is_valid
        self._rows[index] = given
        return self.library.count_nonzero(~is_valid & (index != self.waste_slot))

    def restore(self, slots: Ints, rows: Tensor, is_valid: Tensor) -> None:
        """Copy rows and flags of a checkpoint in; tensors of any device. A row that is not finite
        in this type is not valid."""
        self.write(slots, rows.to(self.device, self.dtype))
        self._is_valid[self.native(slots)] &= self.native(is_valid.to(self.device))

    def pieces(self, count: int) -> Iterator[slice]:
        """Cut `count` rows into pieces of `PIECE_BYTES` or a row: a copy of all never exists."""
        step = max(PIECE_BYTES // (self.width * self.dtype.itemsize), 1)
        for start in range(0, count, step):
            yield slice(start, start + step)

    def native(self, array: NDArray[Any] | Tensor) -> Native:
        """An array, or a tensor of the slab's device, for the library that the slab works with."""
        is_tensor = isinstance(array, Tensor)
        if self.library is np:
            return array.numpy() if is_tensor else array  # type: ignore[union-attr]
        return array if is_tensor else to_device(array, self.device)

    def _allocate(self) -> Tensor:
        shape = (self.capacity + 2, self.width)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        # numpy takes zeros as the system has them: unused slots take no memory. torch writes them.
        zeros = np.zeros((shape[0], self.width * self.dtype.itemsize), np.uint8)
        return torch.from_numpy(zeros).view(self.dtype)
