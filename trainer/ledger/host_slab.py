"""A slab whose rows lie in the host's memory while the model runs on CUDA: for states that the device cannot hold.

Every copy goes straight between a row's place and the device, in streams of their own, and the host waits for none. Since
the host issues work ahead of the device, a row is on its way while the device still computes the micro-batch before. Only a
row that was just written waits for that write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.arrays import Ints
from trainer.ledger.slab import Native, Slab


class HostSlab(Slab):
    """`Slab` with its rows in pinned memory of the host. What is read and written is on `device`, as are the flags.

    Copies are issued row by row: it is meant for rows of many kilobytes.
    """

    def __init__(self, *, width: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(width=width, capacity=capacity, device=device, dtype=dtype)
        self._reading, self._writing = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._written: dict[int, torch.cuda.Event] = {}
        """Slot -> the end of its last write, if that may still be to come."""

    def read(self, slots: Ints) -> tuple[Tensor, Native]:
        """As `Slab.read`: the rows are those of the writes before, once the current stream comes to use them."""
        is_valid = self._is_valid[self.native(slots)]
        with torch.cuda.stream(self._reading):
            rows = torch.zeros(len(slots), self.width, device=self.device, dtype=self.dtype)
            for row, slot in zip(rows, slots.tolist(), strict=True):
                if slot == self.capacity:
                    continue
                if (written := self._written.get(slot)) is not None:
                    self._reading.wait_event(written)
                row.copy_(self._rows[slot], non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._reading)
        rows.record_stream(current)
        return rows.masked_fill_(~is_valid[:, None], 0), is_valid

    def write(self, slots: Ints, rows: Tensor) -> Native:
        """As `Slab.write`: the rows are copied once the current stream has computed them."""
        is_valid = self._flag(slots, rows)
        ended = [slot for slot, written in self._written.items() if written.query()]  # type: ignore[no-untyped-call]
        for slot in ended:
            del self._written[slot]
        # A read of the same row that was issued before came first too: the current stream waits for reads.
        self._writing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._writing):
            kept = [(slot, row) for slot, row in zip(slots.tolist(), rows, strict=True) if slot != self.waste_slot]
            for slot, row in kept:
                self._rows[slot].copy_(row, non_blocking=True)
        rows.record_stream(self._writing)
        self._written.update(dict.fromkeys((slot for slot, _ in kept), self._writing.record_event()))
        return is_valid

    def _allocate(self) -> Tensor:
        return torch.zeros(self.capacity, self.width, dtype=self.dtype, pin_memory=True)
