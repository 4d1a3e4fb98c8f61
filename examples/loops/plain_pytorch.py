"""A plain PyTorch loop, alone or under DDP, with the noise scale and a record that `train diagnose`
reads.

    python examples/loops/plain_pytorch.py                                # one process
    torchrun --nproc_per_node=2 examples/loops/plain_pytorch.py           # DDP, gloo on CPUs or nccl on GPUs

Lines that a loop without them would not have are marked: GNS for the noise scale, REC for the
record.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from task import LENGTH, Counting, TinyGPT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trainer.lab.own_loop import run_status
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.sinks import JsonlSink
from trainer.metrics.tracker import MetricsTracker


def train(steps: int, micro_batches: int, batch_size: int, out: Path) -> None:
    """The loop, on every rank."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: nn.Module = TinyGPT().to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Ranks must see different examples: their difference is the noise.
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(Counting(), world_size, rank, shuffle=False)
    # Without `drop_last`, an epoch's last batch may have fewer rows than batch_size.
    batches = iter(DataLoader(Counting(), batch_size, sampler=sampler, drop_last=True))
    gns = GradientNoiseScale(model, weights_are_tokens=False)  # GNS: once, after DDP has wrapped the model
    sinks = [JsonlSink(out / "metrics.jsonl")] if rank == 0 else []  # REC
    tracker = MetricsTracker(num_devices=world_size, device=device, rank=rank, sinks=sinks)  # REC

    for step in range(1, steps + 1):
        tracker.start_step()  # REC
        gns.begin_window(micro_batches)  # GNS
        loss_sum = torch.zeros((), device=device)
        for k in range(micro_batches):
            is_last = k == micro_batches - 1
            # DDP averages over ranks in the last backward alone.
            waiting = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waiting else contextlib.nullcontext():  # type: ignore[operator]
                loss = model(**{name: tensor.to(device) for name, tensor in next(batches).items()})
                gns.begin_micro(last=is_last)  # GNS
                (loss / micro_batches).backward()
                gns.end_micro(1 / micro_batches, batch_size)  # GNS: the factor on the mean loss, and the examples
            loss_sum += loss.detach() / micro_batches
        noise = gns.step()  # GNS: before clipping, which would change the measured norm
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.is_initialized():
            dist.all_reduce(loss_sum)
            loss_sum /= world_size  # gloo has no average
        tokens = world_size * micro_batches * batch_size * (LENGTH - 1)  # REC: targets
        is_end = step == steps  # REC: the last step is logged whatever the interval
        tracker.end_step(  # REC
            step, loss=loss_sum, grad_norm=grad_norm, lr=3e-3, tokens_in_step=tokens, extra=noise, force_log=is_end
        )
    tracker.close()  # REC


def main() -> None:
    """Parse, join the process group if started by torchrun, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per micro-batch")
    parser.add_argument("--out", type=Path, default=Path("runs/plain_pytorch"))
    options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))
    if (options.out / "metrics.jsonl").exists() and rank == 0:
        sys.exit(f"{options.out} holds a record already: name another directory with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with run_status(options.out, rank=rank):  # REC: status.json, which says how the run ended
        train(options.steps, options.micro_batches, options.batch_size, options.out)
    if dist.is_initialized():
        dist.barrier()  # gloo: a rank that leaves early may abort the others
        dist.destroy_process_group()
    if rank == 0:
        print(f"the record is in {options.out}; what it says: train diagnose {options.out}")


if __name__ == "__main__":
    main()
