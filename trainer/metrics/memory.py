"""Device memory of this process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GB = 1e9


@dataclass(frozen=True)
class MemoryStats:
    """Memory in GB (1e9 bytes), as the caching allocator sees it."""

    allocated_gb: float
    peak_gb: float
    reserved_gb: float
    total_gb: float

    @property
    def mem_utilization(self) -> float:
        """Peak over total: how near the run has come to running out."""
        return self.peak_gb / self.total_gb


def get_memory_stats(device: torch.device | str) -> MemoryStats | None:
    """Memory of a CUDA device (the peak is that since the process started), None for any other kind of device."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return MemoryStats(
        allocated_gb=stats.get("allocated_bytes.all.current", 0) / _GB,
        peak_gb=stats.get("allocated_bytes.all.peak", 0) / _GB,
        reserved_gb=stats.get("reserved_bytes.all.current", 0) / _GB,
        total_gb=torch.cuda.get_device_properties(device).total_memory / _GB,
    )
