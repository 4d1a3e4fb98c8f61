"""Sizes by which a run is judged before it starts."""

from __future__ import annotations

import os

import torch

from trainer.config.schema import LedgerTable


def ledger_bytes(table: LedgerTable, state_width: int) -> int:
    """Memory of the states of one data shard's ledger."""
    return table.capacity * state_width * (2 if table.dtype == "bfloat16" else 4)


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the whole machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
