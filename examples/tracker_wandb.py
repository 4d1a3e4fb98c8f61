"""`MetricsTracker` with wandb in a custom loop: rates, time shares, smoothing and memory are
included.

python examples/tracker_wandb.py --out runs/tracked
wandb sync runs/tracked/wandb/offline-run-*   # afterwards
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from trainer.metrics.sinks import JsonlSink, Sink, StdoutSink
from trainer.metrics.tracker import MetricsTracker
from trainer.tools.services import WandbSink


def main() -> None:
    """Fit a line, and log the metrics of a language model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tracked"))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if (options.out / "metrics.jsonl").exists():
        parser.exit(1, f"{options.out} holds a record already: name another directory with --out\n")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # Offline by default. The run continues if wandb fails, and stops if metrics.jsonl cannot be
    # written.
    wandb = WandbSink(mode="offline", project="examples", run_dir=options.out, config={"steps": options.steps})
    sinks: list[Sink] = [StdoutSink("json"), JsonlSink(options.out / "metrics.jsonl"), wandb]
    tracker = MetricsTracker(num_devices=1, device="cpu", sinks=sinks)
    for step in range(1, options.steps + 1):
        tracker.start_step()
        with tracker.section("data"):
            inputs = torch.randn(32, 8)
            targets = inputs.sum(dim=1, keepdim=True)
        with tracker.section("forward_backward"):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
        with tracker.section("optimizer"):
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        # Tensors are read only on logging steps: no other step waits for the device.
        tracker.end_step(step, loss=loss.detach(), grad_norm=grad_norm, lr=0.1, tokens_in_step=32)
    tracker.log_eval({"loss": loss.item()}, options.steps)
    tracker.close()


if __name__ == "__main__":
    main()
