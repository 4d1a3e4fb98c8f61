"""Whether this node can train: its devices, a product on each, and a sum over ranks, within a bound of time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.distributed.env import rank_info

SIZE = 2048  # of the matrices: their entries are -1, 0 and 1, so that sums are exact in every precision that multiplies them
NUMBERS = 16_000_000


def check_node(seconds: float, on_timeout: Callable[[str], None]) -> tuple[list[str], str]:
    """(lines that say what works, what does not: empty if all does).

    Under torchrun, a rank checks its own device and the sum over all ranks; a process alone checks every device.

    Args:
        seconds: after which `on_timeout` is called, from another thread, with what was being done: a broken device or network
            may never answer.
    """
    doing = ["looking for devices"]
    timer = threading.Timer(seconds, lambda: on_timeout(f"no answer within {seconds:g} s: {doing[0]}"))
    timer.daemon = True
    timer.start()
    try:
        lines: list[str] = []
        info = rank_info()
        expected, found = int(os.environ.get("SLURM_GPUS_ON_NODE", 0)), torch.cuda.device_count()
        if found < expected:
            return lines, f"{found} of {expected} devices are there"
        every = [torch.device("cuda", number) for number in range(found)] or [torch.device("cpu")]
        own = every if info.world_size == 1 else [every[info.local_rank % len(every)]]
        for device in own:
            doing[0] = f"a matrix product on {device}"
            teraflops, is_exact = _multiply(device)
            if not is_exact:
                return lines, f"a matrix product on {device} is wrong"
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            lines.append(f"{device} ({name}): {teraflops:.2g} TFLOP/s in float32")
        if info.world_size > 1:
            doing[0] = f"a sum over {info.world_size} ranks"
            took, is_right = _sum(own[0], info.world_size, info.rank, seconds)
            if not is_right:
                return lines, f"a sum over {info.world_size} ranks is wrong"
            lines.append(f"all-reduce of {NUMBERS * 4 / 1e6:.0f} MB over {info.world_size} ranks: {took * 1e3:.0f} ms")
        return lines, ""
    except RuntimeError as error:  # of CUDA or of a collective
        return lines, f"{doing[0]} fails: {str(error).splitlines()[0]}"
    finally:
        timer.cancel()


def _multiply(device: torch.device) -> tuple[float, bool]:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    expected = one @ other
    here, there = one.to(device), other.to(device)
    products = []
    for _ in range(3):
        began = time.perf_counter()
        products.append((here @ there).cpu())
        took = time.perf_counter() - began
    return 2 * SIZE**3 / took / 1e12, all(torch.equal(product, expected) for product in products)


def _sum(device: torch.device, world_size: int, rank: int, seconds: float) -> tuple[float, bool]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    try:
        for _ in range(2):  # the first one connects
            numbers = torch.full((NUMBERS,), rank + 1.0, device=device)
            began = time.perf_counter()
            dist.all_reduce(numbers)
            is_right = bool((numbers == world_size * (world_size + 1) / 2).all())
            took = time.perf_counter() - began
        return took, is_right
    finally:
        dist.destroy_process_group()
