"""A Lightning `Trainer`, with the noise scale and a record that `train diagnose` reads, as a
callback.

pip install lightning
python examples/loops/with_lightning.py                               # one process
torchrun --nproc_per_node=2 examples/loops/with_lightning.py          # DDP
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from task import LENGTH, Counting, TinyGPT
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    import lightning
except ImportError:
    sys.exit("this example needs lightning: pip install lightning")

from trainer.lab.own_loop import run_status
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.sinks import JsonlSink
from trainer.metrics.tracker import MetricsTracker
from trainer.options import TrackerOptions


class Measure(lightning.Callback):  # type: ignore[misc]
    """Measures every optimizer step and writes metrics.jsonl. For automatic optimization, with rows
    of equal length.

    What a validation logs as `val_loss` or `val/loss` is written as `eval_loss`. One directory is
    one run: the record in `out` is appended to.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hooks on the parameters, which DDP shares with the module."""
        group = dist.group.WORLD if trainer.world_size > 1 else None  # over which DDP averages gradients
        self.gns = GradientNoiseScale(pl_module, process_group=group, weights_are_tokens=False)
        rank, world_size = trainer.global_rank, trainer.world_size
        sinks = [JsonlSink(self.out / "metrics.jsonl")] if rank == 0 else []
        self.tracker = MetricsTracker(
            TrackerOptions(log_interval=trainer.log_every_n_steps),
            num_devices=world_size,
            device=pl_module.device,
            rank=rank,
            sinks=sinks,
        )
        self.count, self.steps, self.last_step = 0, trainer.global_step, trainer.estimated_stepping_batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before a micro-batch."""
        self.m = trainer.accumulate_grad_batches
        if self.count == 0:
            self.loss_sum, self.rows = torch.zeros((), device=pl_module.device), 0
            self.noise = dict[str, float | None]()
            self.tracker.start_step()
            self.gns.begin_window(self.m)
        self.count += 1
        self.gns.begin_micro(last=self.count == self.m)
        self.rows_now = len(batch["input_ids"])  # an epoch's last batch may be shorter
        self.rows += self.rows_now

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """After a micro-batch's backward, whose loss Lightning has divided by m."""
        self.gns.end_micro(1 / self.m, self.rows_now)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """After the window's last backward and before Lightning clips."""
        # The last window of an epoch may be shorter, with the same factor: it is not measured.
        if self.count == self.m:
            self.noise = self.gns.step()
        self.lr = optimizer.param_groups[0]["lr"]  # which a scheduler changes after the step
        self.grad_norm = nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch; after the window's last, the step is written."""
        self.loss_sum += outputs["loss"] * self.m * self.rows_now  # Lightning has divided the mean loss by m
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        self.tracker.end_step(
            self.steps,
            loss=trainer.strategy.reduce(self.loss_sum / self.rows, reduce_op="mean"),
            grad_norm=self.grad_norm,
            lr=self.lr,
            tokens_in_step=trainer.world_size * self.rows * (LENGTH - 1),  # targets
            extra=self.noise,
            force_log=self.steps == self.last_step,
        )
        self.count = 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """After a validation during training; pass `sync_dist=True` to `self.log` where there are
        several ranks."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            logged = trainer.callback_metrics.items()
            found = {key[len("val_") :]: value for key, value in logged if key.startswith(("val_", "val/"))}
            self.tracker.log_eval(found, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks, close the record."""
        self.gns.close()
        self.tracker.close()


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The model and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch."""
        loss: Tensor = self.model(**batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per micro-batch")
    parser.add_argument("--out", type=Path, default=Path("runs/with_lightning"))
    options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))
    if (options.out / "metrics.jsonl").exists() and rank == 0:
        sys.exit(f"{options.out} holds a record already: name another directory with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_steps=options.steps,
        accumulate_grad_batches=options.micro_batches,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[Measure(options.out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with run_status(options.out, rank=rank):  # status.json, which says how the run ended
        trainer.fit(Module(), DataLoader(Counting(), options.batch_size))
    if rank == 0:
        print(f"the record is in {options.out}; what it says: train diagnose {options.out}")


if __name__ == "__main__":
    main()
