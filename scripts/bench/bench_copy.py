"""Measured bandwidth of copies, with which other figures can be compared: within the device's memory, and from and to the host.

Within memory each byte is read and written, and both are counted, as data sheets count them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from bench_table import Figure, print_figures
from torch import Tensor


def wait_for(device: str) -> None:
    """Until the device has done what was queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], *, device: str, rounds: int) -> float:
    """Of one call, on a device that had nothing else to do; the first call is not counted."""
    times = []
    for _ in range(rounds + 1):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def bandwidth(source: Tensor, to: Tensor, *, device: str, rounds: int, passes: int) -> float:
    """GB/s of a copy in which each byte passes the memory so many times."""
    seconds = median_seconds(lambda: to.copy_(source, non_blocking=True), device=device, rounds=rounds)
    return passes * source.nbytes / seconds / 1e9


def measure(device: str, megabytes: int, rounds: int) -> list[Figure]:
    """Within the device's memory, and with the host in both directions from pinned and pageable memory."""
    own = torch.zeros(megabytes * 10**6, dtype=torch.uint8, device=device)
    found = [("within the memory", bandwidth(own, torch.empty_like(own), device=device, rounds=rounds, passes=2))]
    for kind in ("pinned", "pageable") if device == "cuda" else ():
        host = torch.zeros(megabytes * 10**6, dtype=torch.uint8, pin_memory=kind == "pinned")
        found.append((f"host to device, {kind}", bandwidth(host, own, device=device, rounds=rounds, passes=1)))
        found.append((f"device to host, {kind}", bandwidth(own, host, device=device, rounds=rounds, passes=1)))
    return [Figure(name, value, "GB/s") for name, value in found]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of a copy, 1e6 bytes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    found = measure(args.device, args.megabytes, args.rounds)
    print_figures("copy", found, as_json=args.json, check=False)


if __name__ == "__main__":
    main()
