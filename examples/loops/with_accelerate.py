"""A loop on Hugging Face accelerate, with the noise scale and a record that `train diagnose` reads.

    pip install accelerate
    python examples/loops/with_accelerate.py                              # one process
    torchrun --nproc_per_node=2 examples/loops/with_accelerate.py         # DDP; or `accelerate launch`

Lines that a loop without them would not have are marked: GNS for the noise scale, REC for the
record.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from task import LENGTH, Counting, TinyGPT
from torch.utils.data import DataLoader

try:
    from accelerate import Accelerator
except ImportError:
    sys.exit("this example needs accelerate: pip install accelerate")

from trainer.lab.own_loop import run_status
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.sinks import JsonlSink
from trainer.metrics.tracker import MetricsTracker


def train(steps: int, m: int, batch_size: int, out: Path) -> None:
    """The loop, on every rank; m micro-batches per step."""
    accelerator = Accelerator(gradient_accumulation_steps=m, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Counting(), batch_size))
    gns = GradientNoiseScale(model, weights_are_tokens=False)  # GNS: once, after `prepare` has wrapped the model
    world_size, rank = accelerator.num_processes, accelerator.process_index
    sinks = [JsonlSink(out / "metrics.jsonl")] if rank == 0 else []  # REC
    device = accelerator.device
    tracker = MetricsTracker(num_devices=world_size, device=device, rank=rank, sinks=sinks)  # REC

    step, count, rows, loss_sum = 1, 0, 0, torch.zeros((), device=device)
    for batch in batches:
        if count == 0:
            tracker.start_step()  # REC
            gns.begin_window(m)  # GNS
        with accelerator.accumulate(model):
            loss = model(**batch)
            gns.begin_micro(last=accelerator.sync_gradients)  # GNS
            accelerator.backward(loss)  # which divides by m
            rows_now = len(batch["input_ids"])  # an epoch's last batch may be shorter
            gns.end_micro(1 / m, rows_now)  # GNS: the factor on the mean loss, and the examples
            count, rows = count + 1, rows + rows_now
            loss_sum += loss.detach() * rows_now
            if accelerator.sync_gradients:
                # The last window of an epoch may be shorter, with the same factor: it is not
                # measured.
                noise = gns.step() if count == m else {}  # GNS: before clipping
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            tokens = world_size * rows * (LENGTH - 1)  # REC: targets
            loss = accelerator.reduce(loss_sum / rows, "mean")
            is_end = step == steps  # REC: the last step is logged whatever the interval
            tracker.end_step(  # REC
                step, loss=loss, grad_norm=grad_norm, lr=3e-3, tokens_in_step=tokens, extra=noise, force_log=is_end
            )
            step, count, rows, loss_sum = step + 1, 0, 0, torch.zeros((), device=device)
        if step > steps:
            break
    tracker.close()  # REC
    accelerator.end_training()


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per micro-batch")
    parser.add_argument("--out", type=Path, default=Path("runs/with_accelerate"))
    options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))
    if (options.out / "metrics.jsonl").exists() and rank == 0:
        sys.exit(f"{options.out} holds a record already: name another directory with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    with run_status(options.out, rank=rank):  # REC: status.json, which says how the run ended
        train(options.steps, options.micro_batches, options.batch_size, options.out)
    if rank == 0:
        print(f"the record is in {options.out}; what it says: train diagnose {options.out}")


if __name__ == "__main__":
    main()
