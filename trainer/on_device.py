"""Copies to and from the device, and decisions on it, without the host waiting; memory and peak.

The optimizer learns whether to step by `found_inf`, the flag of torch's loss scaling.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainer.files import parse_count

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
ALIGNMENT = 512  # bytes, as CUDA's allocator aligns what is not part of a block


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor of `values` on the device; to CUDA from pinned memory, without blocking the host."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")  # or the host reads too early


def move_together(batch: dict[str, Any], keys: Iterable[str], device: torch.device) -> None:
    """Turn a batch's values of these keys into tensors on the device, with one copy."""
    of_host: dict[str, Tensor] = {}
    for key in keys:
        if key in batch:
            batch[key] = tensor = torch.as_tensor(batch[key])
            if tensor.device.type == "cpu" and device.type != "cpu":
                of_host[key] = tensor
            else:
                batch[key] = tensor.to(device)
    if of_host:
        batch |= copied_together(of_host, device)


def copied_together(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The host's tensors on the device, as parts of one block; does not wait for the copy."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(torch.split(block, sizes), tensors.values(), strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    found = {}
    parts = torch.split(block.to(device, non_blocking=True), sizes)
    for (key, tensor), part in zip(tensors.items(), parts, strict=True):
        found[key] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return found


def seed_model(device: torch.device, *key: int) -> None:
    """Seed the generators of CPU and current device, much faster than `torch.manual_seed`."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


class HostCopy:
    """A vector of a device that is copied to the host without waiting for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._is_there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """The numbers. Waits for the copy, not for what was queued after it."""
        if self._is_there is not None:
            self._is_there.synchronize()
        values: list[float] = self._values.tolist()
        return values


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer accepts a `found_inf` on the device: torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(is_bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, which changes nothing if `is_bad` (bool [], on the device).

    The first step creates the optimizer's state, even if it is bad; see `optimizer.keep_buffers`.
    """
    guarded: Any = optimizer  # torch knows the attribute, its types do not
    guarded.found_inf = is_bad.float()
    try:
        optimizer.step()
    finally:
        del guarded.found_inf


def scale_gradients(gradients: list[Tensor], loss_factor: Tensor, grad_sq: Tensor, limit: float) -> None:
    """Divide the gradients by `loss_factor` and clip them to norm `limit`, in one multiplication.

    Args:
        loss_factor: c, where the gradients are c times the true ones; [] float64.
        grad_sq: squared norm of `gradients`, [] float64.
        limit: largest norm of the true gradient; 0: no clipping.
    """
    one = torch.ones_like(loss_factor)
    shrink = one
    if limit:
        # Not `limit / tensor`, which multiplies by an inverse and so rounds twice.
        shrink = torch.minimum(one * limit / (grad_sq.sqrt() / loss_factor + 1e-6), one)
    scale = shrink / loss_factor
    if {*map(attrgetter("dtype"), gradients)} == {torch.float32}:
        scale = scale.float()  # a scale of the gradients' own type takes one kernel for all of them
    torch._foreach_mul_(gradients, scale)


def memory_of(device: torch.device) -> int:
    """Bytes that this rank may count on: of a CUDA device, or its part of the host or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks = parse_count(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):  # a container's limit (cgroup v2); "max": none
        whole = min(whole, parse_count(CONTAINER_LIMIT.read_text().strip()) or whole)
    return whole // ranks


def get_memory_stats(device: torch.device | str) -> dict[str, float]:
    """Memory of a CUDA device in GB (1e9 bytes), as the caching allocator sees it; empty for others.

    The peak is that since the process started, and `mem_utilization` its share of the total.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    found = {
        "allocated_gb": stats.get("allocated_bytes.all.current", 0) / 1e9,
        "peak_gb": stats.get("allocated_bytes.all.peak", 0) / 1e9,
        "reserved_gb": stats.get("reserved_bytes.all.current", 0) / 1e9,
        "total_gb": torch.cuda.get_device_properties(device).total_memory / 1e9,
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


def peak_tflops_of(device: torch.device | str) -> float | None:
    """The peak of a device, None where it is unknown."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return lookup_peak_tflops(torch.cuda.get_device_name(device))


def compute_mfu(
    *, tokens_per_sec: float, flops_per_token: float, num_devices: int, peak_tflops: float | None
) -> float | None:
    """MFU as a fraction, None where the peak or the model's FLOPs are unknown.

    `tokens_per_sec`: over all devices; `flops_per_token`: real FLOPs of forward and backward, 0 if
    unknown; `peak_tflops`: of one device, in 1e12 FLOP/s.
    """
    if peak_tflops is None or flops_per_token <= 0.0:
        return None
    return tokens_per_sec * (flops_per_token / (num_devices * peak_tflops * 1e12))
