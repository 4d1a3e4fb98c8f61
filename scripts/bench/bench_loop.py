"""The trainer against a bare loop, `transformers.Trainer` and Lightning: tokens per second and peak memory.

The same model, batches and optimizer in processes that take turns, step by step; losses must agree at every step.

The trainer runs in full: mixing with its metrics, prefetching, ledger (state cache), noise scale in every step, timing,
payloads, metrics.jsonl. The others read the same batches from a data set, keep states in one table, clip, and log nothing but
a loss every ten steps. The same loop may be 5 % faster in one process than in the next: each is launched several times.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_table import Figure, bench_parser, over, ratio_figure, run_bench
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from trainer_run import ALONE, LOG_INTERVAL, TINY, plan_of, run_trainer
from turns import Turn, run_in_turns

from trainer.arrays import IGNORED, Ints
from trainer.cli.parts import PARTS
from trainer.data.loader import Loader, MicroBatch
from trainer.distributed.strategy import compile_blocks
from trainer.training.build import autocast_context, make_blend
from trainer.training.optimizer import build_optimizer, lr_at
from trainer.training.plan import Plan, build_model, width_of

GOALS = {"cpu": 0.97, "cuda": 0.99}
MAX_MEMORY = 1.05


class Windows(IterableDataset[dict[str, Any]]):
    """The micro-batches that the trainer will read, with what the loss of their window is divided by."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(Loader(make_blend(self._plan, ALONE), device=self._device, prefetch=0))
        while True:
            window = [next(batches) for _ in range(self._plan.config.micro_batches.most)]
            num_tokens = sum((micro.targets != IGNORED).sum() for micro in window)
            for micro in window:
                yield {"micro": micro, "num_tokens": num_tokens}


class Stateful(nn.Module):
    """Any model with one table of states: maps a micro-batch to its share of the window's mean loss."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        config = plan.config
        torch.manual_seed(config.run.seed)
        self.model = build_model(config.model, plan.vocab_size, parts=PARTS).to(device)
        self._capacity, self._autocast = config.ledger.capacity, autocast_context(config, device)
        self._table = torch.zeros(self._capacity, width_of(self.model), device=device)  # [capacity, state_width]
        self._rows: dict[int, int] = {}
        self.loss = torch.zeros((), device=device)  # since it was last taken
        if config.train.compile:
            compile_blocks(self.model)

    def forward(self, micro: MicroBatch, num_tokens: Tensor) -> Tensor:
        """The loss, []."""
        assert micro.carry is not None
        ends = micro.carry.group_ids if micro.carry.end_ids is None else micro.carry.end_ids
        begun, ended = map(self._rows_of, (micro.carry.group_ids, ends))
        continues = torch.from_numpy((micro.carry.cell_index > 0).astype(np.float32)).to(begun.device)
        with self._autocast():
            output = self.model(**micro.inputs, state=self._table[begun] * continues[:, None])
            logits = output.logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, micro.targets.flatten(), ignore_index=IGNORED, reduction="sum") / num_tokens
        self._table[ended] = output.state.detach().float()
        self.loss += loss.detach()
        return loss

    def _rows_of(self, groups: Ints) -> Tensor:
        rows = [self._rows.setdefault(group, len(self._rows) % self._capacity) for group in groups.tolist()]
        return torch.tensor(rows, device=self._table.device)

    def take_loss(self) -> Tensor:
        loss, self.loss = self.loss, torch.zeros_like(self.loss)
        return loss


def optimizer_of(plan: Plan, model: Stateful) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """As the trainer's, with its learning rate per step."""
    config = plan.config
    optimizer = build_optimizer(model.model, config.optimizer, plan.parts)
    table, steps, peak = config.scheduler, config.train.steps, config.optimizer.lr
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: lr_at(done + 1, steps=steps, peak=peak, table=table) / peak
    )
    return optimizer, rates


def bare(plan: Plan, device: torch.device, turn: Turn) -> None:
    config, batches, model = plan.config, iter(Windows(plan, device)), Stateful(plan, device)
    optimizer, rates = optimizer_of(plan, model)
    for step in range(1, config.train.steps + 1):
        for _ in range(config.micro_batches.most):
            model(**next(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad(set_to_none=True)
        turn.update(step, model.take_loss())


def with_transformers(plan: Plan, device: torch.device, turn: Turn) -> None:
    """`transformers.Trainer`, with an iterable data set and a model that returns its loss."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turn.update(state.global_step, model.take_loss())

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stateful = model

        def forward(self, micro: MicroBatch, num_tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": self.stateful(micro, num_tokens) * window}

    config, model = plan.config, Stateful(plan, device)
    window = config.micro_batches.most  # by which the Trainer divides each loss
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=config.train.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=window,
            max_grad_norm=config.train.clip_grad_norm,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            accelerator_config={"dispatch_batches": False},
            disable_tqdm=True,
        )
        Trainer(
            Losses(),
            arguments,
            train_dataset=Windows(plan, device),
            data_collator=lambda rows: rows[0],
            optimizers=optimizer_of(plan, model),
            callbacks=[Steps()],
        ).train()


def with_lightning(plan: Plan, device: torch.device, turn: Turn) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stateful = model

        def training_step(self, batch: dict[str, Any]) -> Tensor:
            loss: Tensor = self.stateful(**batch) * window
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, rates = optimizer_of(plan, model)
            return [optimizer], [{"scheduler": rates, "interval": "step"}]

        def optimizer_step(self, *args: Any, **named: Any) -> None:
            super().optimizer_step(*args, **named)
            turn.update(self.global_step + 1, model.take_loss())  # which is counted after this

    config, model = plan.config, Stateful(plan, device)
    window = config.micro_batches.most  # by which Lightning divides each loss
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=config.train.steps,
        accumulate_grad_batches=window,
        gradient_clip_val=config.train.clip_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Windows(plan, device), batch_size=None))


Loop = Callable[[Plan, torch.device, Turn], None]
OTHERS: dict[str, Loop] = {"bare loop": bare, "transformers": with_transformers, "lightning": with_lightning}


def measure(args: argparse.Namespace) -> list[Figure]:
    names = [name for name in OTHERS if name == "bare loop" or importlib.util.find_spec(name)]
    runs = {name: partial(only, name, args) for name in ("trainer", *names)}
    launches = [run_in_turns(runs, args.device, args.steps) for _ in range(args.launches)]
    blocks = {name: [block for each in launches for block in each[name][1:]] for name in runs}
    times = {name: [block.seconds for block in each] for name, each in blocks.items()}
    ours = blocks.pop("trainer")
    speeds, memory = [], []
    for name, each in blocks.items():
        ratios = over(times[name], times["trainer"])
        what = f"tokens per second, trainer over {name}"
        speeds.append(ratio_figure(what, ratios, at_least=GOALS[args.device]))
        ratio, what = ours[-1].peak_mb / each[-1].peak_mb, f"peak memory, trainer over {name}"
        memory.append(Figure(what, ratio, "x", at_most=MAX_MEMORY))
    seconds = statistics.median(times["trainer"]) / LOG_INTERVAL
    return [*speeds, *memory, Figure("seconds per step: trainer", seconds, "s")]


def only(loop: str, args: argparse.Namespace, turn: Turn) -> None:
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        sets = [*(TINY if args.tiny else ()), *args.sets]
        plan = plan_of(Path(name), args.config, steps=args.steps, device=args.device, sets=sets)
        others = {each: partial(run, plan, device) for each, run in OTHERS.items()}
        run = others.get(loop, partial(run_trainer, plan, Path(name), device))
        run(turn)


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cpu", sets=True)
    parser.add_argument("--config", type=Path, help="config of the run (default: 10 M parameters on synthetic text)")
    parser.add_argument("--tiny", action="store_true", help="shrink the config's model and batches: a rehearsal")
    parser.add_argument("--steps", type=int, default=20, help="steps of each process, a multiple of 10")
    parser.add_argument("--launches", type=int, default=7, help="processes of each loop")
    run_bench("loop", parser, measure)
