"""The gradient noise scale in Hugging Face `Trainer`, as a callback.

    pip install 'trainer[hf]'
    python examples/gns_hf_trainer.py                                  # one process
    torchrun --nproc_per_node=2 examples/gns_hf_trainer.py             # DDP

The model is a two-layer GPT-2 with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install 'trainer[hf]'")

from trainer.metrics.noise_scale.hooks import GradientNoiseScale


class NoiseScaleCallback(TrainerCallback):  # type: ignore[misc]
    """Measures every optimizer step and adds `gns/*` to the Trainer's log history.

    Rows must have the same number of target tokens (packed data): then the Trainer's loss of a micro-batch is its mean
    divided by m, whether it divides by m or by the tokens of the step. The Trainer clips before any callback sees the
    gradient, which would change the measured norm, so its clipping must be off; this callback clips instead.
    """

    def __init__(self, max_grad_norm: float = 1.0) -> None:
        self.max_grad_norm = max_grad_norm

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Register the hooks on the parameters, which DDP shares with `model`."""
        if args.max_grad_norm:
            raise SystemExit("set TrainingArguments(max_grad_norm=0): NoiseScaleCallback clips after it has measured")
        if args.fp16:
            raise SystemExit("fp16 scales the loss by a factor that callbacks cannot read; use bf16")
        group = dist.group.WORLD if args.world_size > 1 else None  # whether DDP averages gradients
        self.gns = GradientNoiseScale(model, process_group=group, weights_are_tokens=False)
        self.metrics: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the window's first micro-batch."""
        self.num_micros = 0
        self.gns.begin_window(args.gradient_accumulation_steps)
        self._begin_micro(args)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After every micro-batch but the window's last."""
        self._end_micro(args)
        self._begin_micro(args)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """After the window's last micro-batch: measure, then clip."""
        self._end_micro(args)
        # The last window of an epoch may be shorter, with another factor on its losses; every rank skips it.
        if self.num_micros == args.gradient_accumulation_steps:
            self.metrics = self.gns.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add a row to the history, which the Trainer saves as trainer_state.json."""
        if self.metrics:
            state.log_history.append({**self.metrics, "step": state.global_step})
            self.metrics = {}  # the Trainer logs again at the end of training

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        self.gns.close()

    def _begin_micro(self, args: Any) -> None:
        self.gns.begin_micro(last=self.num_micros == args.gradient_accumulation_steps - 1)

    def _end_micro(self, args: Any) -> None:
        self.gns.end_micro(1 / args.gradient_accumulation_steps, args.per_device_train_batch_size)
        self.num_micros += 1


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 16 tokens that count up from a random start; one in four is replaced by a random one."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = (torch.randint(64, (1,), generator=generator) + torch.arange(16)) % 64
        noise = torch.randint(64, row.shape, generator=generator)
        row = torch.where(torch.rand(row.shape, generator=generator) < 0.25, noise, row)
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    # Without dropout, micro-batches differ only in their examples.
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            learning_rate=3e-3,
            max_grad_norm=0.0,  # see NoiseScaleCallback
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),  # otherwise torchrun's ranks would train independently
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=Counting(), callbacks=[NoiseScaleCallback()]
        )
        trainer.train()
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "gns/b_simple" in row:
                low, high = row["gns/b_simple_low"], row["gns/b_simple_high"]
                print(f"step {row['step']}: noise scale {row['gns/b_simple']:.1f} ({low:.1f} to {high:.1f}) sequences")
            elif "gns/b_simple_low" in row:
                print(f"step {row['step']}: noise scale at least {row['gns/b_simple_low']:.1f} sequences")


if __name__ == "__main__":
    main()
