"""Whether this node can train: its devices, a product on each, and a sum over ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.distributed.env import pick_backend, rank_info

SIZE = 2048  # of matrices of -1, 0 and 1: sums are exact in every precision that multiplies them
NUMBERS = 16_000_000


class NodeCheck:
    """Under torchrun a rank checks its device and the sum over ranks; alone, every device.

    `doing` says what is being tried: a broken device or network may never answer.
    """

    def __init__(self) -> None:
        self.doing = "looking for devices"
        self.lines: list[str] = []

    def run(self, seconds: float) -> str:
        """The problem of the node; empty: there is none, and `lines` say what works."""
        try:
            info = rank_info()
            expected = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
            found = torch.cuda.device_count()
            if found < expected:
                return f"{found} of {expected} devices are there"
            devices = [torch.device("cuda", number) for number in range(found)] or [torch.device("cpu")]
            if info.world_size > 1:
                devices = [devices[info.local_rank % len(devices)]]
            works = all(map(self._multiplies, devices))
            if works and info.world_size > 1:
                works = self._sums(devices[0], seconds)
        except RuntimeError as error:  # of CUDA or of a collective
            return f"{self.doing} fails: {str(error).splitlines()[0]}"
        return "" if works else f"{self.doing} is wrong"

    def _multiplies(self, device: torch.device) -> bool:
        self.doing = f"a matrix product on {device}"
        generator = torch.Generator().manual_seed(0)
        one, other = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator).float() for _ in range(2))
        expected, here, there = one @ other, one.to(device), other.to(device)
        for _ in range(3):  # the first one loads the kernel
            began = time.perf_counter()
            if not torch.equal((here @ there).cpu(), expected):
                return False
            took = time.perf_counter() - began
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        speed = f"{2 * SIZE**3 / took / 1e12:.2g} TFLOP/s in float32, with the copy back"
        self.lines.append(f"{device} ({name}): {speed}")
        return True

    def _sums(self, device: torch.device, seconds: float) -> bool:
        self.doing = "a sum over all ranks"
        dist.init_process_group(pick_backend(device), timeout=timedelta(seconds=seconds))
        ranks = dist.get_world_size()
        for _ in range(2):  # the first one connects
            began = time.perf_counter()
            numbers = torch.full((NUMBERS,), dist.get_rank() + 1.0, device=device)
            dist.all_reduce(numbers)
            is_right = bool((numbers == ranks * (ranks + 1) / 2).all())
            took = time.perf_counter() - began
        dist.destroy_process_group()
        size = f"{NUMBERS * 4 / 1e6:.0f} MB"
        self.lines.append(f"all-reduce of {size} over {ranks} ranks: {took * 1e3:.0f} ms")
        return is_right
