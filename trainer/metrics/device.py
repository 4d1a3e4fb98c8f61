"""This process's device: its memory, and the share of its peak that a model reaches."""

from __future__ import annotations

import re
from typing import Final

import torch

from trainer.metrics.aggregate import Scalar

_GB = 1e9


def get_memory_stats(device: torch.device | str) -> dict[str, float]:
    """Memory of a CUDA device in GB (1e9 bytes), as the caching allocator sees it; empty for others.

    The peak is that since the process started, and `mem_utilization` its share of the total.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    found = {
        "allocated_gb": stats.get("allocated_bytes.all.current", 0) / _GB,
        "peak_gb": stats.get("allocated_bytes.all.peak", 0) / _GB,
        "reserved_gb": stats.get("reserved_bytes.all.current", 0) / _GB,
        "total_gb": torch.cuda.get_device_properties(device).total_memory / _GB,
    }
    return {**found, "mem_utilization": found["peak_gb"] / found["total_gb"]}


# Dense bf16 tensor-core peaks in TFLOPS from the makers' data sheets (which often print the sparse
# figure, twice as large). The first pattern that matches the whole device name counts; a MIG slice
# or an unlisted card has no peak.
PEAK_TFLOPS: Final[tuple[tuple[str, float], ...]] = (
    (r"NVIDIA B200.*", 2250.0),  # HGX B200: 36 PFLOPS sparse for eight
    (r"NVIDIA (H200 NVL|H100 NVL)", 835.5),  # H100 NVL, H200 NVL: 1,671 sparse
    (r"NVIDIA H100 PCIe", 756.5),  # H100 PCIe: 1,513 sparse
    (r"NVIDIA (H100 80GB HBM3|H200|GH200 .*)", 989.5),  # H100 SXM, H200 SXM, GH200: 1,979 sparse
    (r"(NVIDIA )?A100[- ].*", 312.0),
    (r"NVIDIA A40", 149.7),
    (r"NVIDIA A30", 165.0),
    (r"NVIDIA A10", 125.0),
    (r"NVIDIA L40S", 362.05),
    (r"NVIDIA L4", 121.0),  # 242 sparse
    (r"AMD Instinct MI300X.*", 1307.4),
)


def lookup_peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a device by the name that its driver gives, None if unknown."""
    if " MIG " in device_name:
        return None
    return next((peak for pattern, peak in PEAK_TFLOPS if re.fullmatch(pattern, device_name)), None)


def resolve_peak_tflops(device: torch.device | str, override: float = 0.0) -> float | None:
    """The override if it is positive, else the device's own peak, None where it is unknown."""
    if override > 0.0:
        return override
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return lookup_peak_tflops(torch.cuda.get_device_name(device))


def compute_mfu(
    *, tokens_per_sec: Scalar, flops_per_token: float, num_devices: int, peak_tflops: float | None
) -> Scalar | None:
    """MFU as a fraction, None where the peak or the model's FLOPs are unknown.

    Args:
        tokens_per_sec: over all devices.
        flops_per_token: forward and backward of the model, real FLOPs; 0 if unknown.
        num_devices: devices that share the work.
        peak_tflops: peak of one device in 1e12 FLOP/s.
    """
    if peak_tflops is None or flops_per_token <= 0.0:
        return None
    return tokens_per_sec * (flops_per_token / (num_devices * peak_tflops * 1e12))
