"""Hugging Face `Trainer`, with the noise scale and a record that `train diagnose` reads, as a
callback.

    pip install transformers accelerate
    python examples/loops/with_hf_trainer.py                              # one process
    torchrun --nproc_per_node=2 examples/loops/with_hf_trainer.py         # DDP

The model is a two-layer GPT-2 with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from task import LENGTH, VOCAB, Counting

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install transformers accelerate")

from trainer.lab.own_loop import run_status
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.sinks import JsonlSink
from trainer.metrics.tracker import MetricsTracker
from trainer.options import TrackerOptions


class Measure(TrainerCallback):  # type: ignore[misc]
    """Measures every optimizer step and writes metrics.jsonl.

    Rows must have the same number of target tokens (packed data): then the Trainer's loss of a
    micro-batch is its mean divided by m, whether it divides by m or by the tokens of the step. The
    Trainer clips before any callback sees the gradient, which would change the measured norm, so
    its clipping must be off; this callback clips instead. The loss of a row is the Trainer's own, a
    mean over the steps since the last one. Evaluations during training are written too. One
    directory is one run: the record in `out` is appended to.
    """

    def __init__(self, out: Path, max_grad_norm: float = 1.0) -> None:
        self.out, self.max_grad_norm, self.is_training = out, max_grad_norm, False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Refuse settings that would make numbers wrong; register the hooks on the parameters,
        which DDP shares with `model`.

        Raises:
            ValueError: such a setting, and what to set instead.
        """
        refuse(args)
        # Callbacks do not see the batches. The model does, and an epoch's last batch may be
        # shorter.
        self.counting = model.register_forward_pre_hook(self._count_rows, with_kwargs=True)
        group = dist.group.WORLD if args.world_size > 1 else None  # over which DDP averages gradients
        self.gns = GradientNoiseScale(model, process_group=group, weights_are_tokens=False)
        rank = args.process_index
        self.tracker = MetricsTracker(
            TrackerOptions(log_interval=state.logging_steps),
            num_devices=args.world_size,
            device=args.device,
            rank=rank,
            sinks=[JsonlSink(self.out / "metrics.jsonl")] if rank == 0 else [],
        )
        self.is_training = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the window's first micro-batch."""
        self.rows, self.noise = list[int](), dict[str, float | None]()  # rows: of each micro-batch
        self.tracker.start_step()
        self.gns.begin_window(args.gradient_accumulation_steps)
        self._begin_micro(args)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After every micro-batch but the window's last."""
        self._end_micro(args)
        self._begin_micro(args)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """After the window's last micro-batch: measure, then clip."""
        self._end_micro(args)
        # The last window of an epoch may be shorter, with other factors on its losses: it is not
        # measured.
        if self.rows == self.rows[:1] * args.gradient_accumulation_steps:
            self.noise = self.gns.step()
        self.lr = optimizer.param_groups[0]["lr"]  # which the scheduler changes after the step
        self.grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an update that is not logged; the loss is known on logged ones alone, and the last
        is made one of them."""
        control.should_log |= state.global_step >= state.max_steps
        if not control.should_log:
            self._end_step(args, state, None)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """After an update that is logged; the Trainer also logs at the end, without a loss."""
        if "loss" in logs:
            self._end_step(args, state, float(logs["loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **_: Any) -> None:
        """After an evaluation during training: its numbers, but not its own speed (`eval_runtime`
        and the like)."""
        if self.is_training:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            speeds = {key for key in numbers if key.endswith(("_runtime", "_time", "_per_second"))}
            self.tracker.log_eval({key: numbers[key] for key in numbers.keys() - speeds - {"epoch"}}, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks, close the record."""
        self.is_training = False
        self.counting.remove()
        self.gns.close()
        self.tracker.close()

    def _count_rows(self, module: Any, positional: Any, inputs: Any) -> None:
        self.rows_now = len(inputs["input_ids"])

    def _begin_micro(self, args: Any) -> None:
        self.gns.begin_micro(last=len(self.rows) == args.gradient_accumulation_steps - 1)

    def _end_micro(self, args: Any) -> None:
        self.gns.end_micro(1 / args.gradient_accumulation_steps, self.rows_now)
        self.rows.append(self.rows_now)

    def _end_step(self, args: Any, state: Any, loss: float | None) -> None:
        self.tracker.end_step(
            state.global_step,
            loss=loss,
            grad_norm=self.grad_norm,
            lr=self.lr,
            tokens_in_step=args.world_size * sum(self.rows) * (LENGTH - 1),  # targets
            extra=self.noise,
            force_log=loss is not None,
        )


def refuse(args: Any) -> None:
    """Raise ValueError for training arguments with which the record would be wrong."""
    for is_wrong, setting, why in (
        (args.max_grad_norm, "max_grad_norm=0", "Measure clips after it has measured"),
        (args.logging_nan_inf_filter, "logging_nan_inf_filter=False", "otherwise a NaN loss is logged as a finite one"),
        (args.logging_strategy != "steps", "logging_strategy='steps'", "a row takes the loss logged at its step"),
        (args.fp16, "fp16=False", "it scales the loss by a factor that callbacks cannot read; use bf16"),
    ):
        if is_wrong:
            raise ValueError(f"set TrainingArguments({setting}): {why}")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/with_hf_trainer"))
    options, rank = parser.parse_args(), int(os.environ.get("RANK", "0"))
    if (options.out / "metrics.jsonl").exists() and rank == 0:
        sys.exit(f"{options.out} holds a record already: name another directory with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    # Without dropout, micro-batches differ only in their examples.
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            learning_rate=3e-3,
            max_grad_norm=0.0,  # see Measure
            logging_nan_inf_filter=False,  # see Measure
            logging_steps=10,
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),  # otherwise torchrun's ranks would train independently
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=Counting(), callbacks=[Measure(options.out)]
        )
        with run_status(options.out, rank=rank):  # status.json, which says how the run ended
            trainer.train()
    if rank == 0:
        print(f"the record is in {options.out}; what it says: train diagnose {options.out}")


if __name__ == "__main__":
    main()
