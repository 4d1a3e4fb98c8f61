"""Checks a node: devices are there (SLURM_GPUS_ON_NODE of them), each multiplies correctly, and ranks can sum.

    python scripts/slurm/check_node.py                             # every device
    torchrun --nproc_per_node=8 scripts/slurm/check_node.py        # the network between them too

Exit code 3: the node cannot train, or something did not answer: a broken device or network may hang forever.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from threading import Timer

import torch
import torch.distributed as dist

SECONDS = 120.0  # in which everything has to answer
SIZE = 2048  # of matrices of -1, 0 and 1: sums are exact in every precision that multiplies them
NUMBERS = 16_000_000


def say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", flush=True)


def multiplies(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    expected, here, there = one @ other, one.to(device), other.to(device)
    for _ in range(3):  # the first one loads the kernel
        began = time.perf_counter()
        if not torch.equal((here @ there).cpu(), expected):
            return False
    speed = 2 * SIZE**3 / (time.perf_counter() - began) / 1e12
    say(f"{device}: {speed:.2g} TFLOP/s in float32, with the copy back")
    return True


def sums(device: torch.device) -> bool:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS))
    ranks = dist.get_world_size()
    for _ in range(2):  # the first one connects
        began = time.perf_counter()
        numbers = torch.full((NUMBERS,), dist.get_rank() + 1.0, device=device)
        dist.all_reduce(numbers)
        is_right = bool((numbers == ranks * (ranks + 1) / 2).all())
    say(f"all-reduce of 64 MB over {ranks} ranks: {(time.perf_counter() - began) * 1e3:.0f} ms")
    dist.destroy_process_group()
    return is_right


def problem() -> str:
    """The problem of the node; empty: there is none."""
    found, expected = torch.cuda.device_count(), int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    if found < expected:
        return f"{found} of {expected} devices are there"
    devices = [torch.device("cuda", number) for number in range(found)] or [torch.device("cpu")]
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_launched:
        devices = [devices[int(os.environ["LOCAL_RANK"]) % len(devices)]]
    for device in devices:
        if not multiplies(device):
            return f"a matrix product on {device} is wrong"
    return "" if not is_launched or sums(devices[0]) else "a sum over all ranks is wrong"


def main() -> None:
    def leave() -> None:  # what hangs cannot be ended otherwise
        say(f"no answer within {SECONDS:g} s")
        os._exit(3)

    timer = Timer(SECONDS, leave)
    timer.start()
    try:
        text = problem()
    except RuntimeError as error:  # of CUDA or of a collective
        text = f"fails: {str(error).splitlines()[0]}"
    timer.cancel()
    say(text or "this node can train")
    sys.exit(3 if text else 0)


if __name__ == "__main__":
    main()
