"""Overhead of the trainer's loop over a bare one: same model, batches and optimizer, alternating step by step.

The trainer runs in full: mixing with its metrics, prefetching, ledger (state cache), noise scale in every step, timing,
payloads to /dev/null and metrics.jsonl. The bare loop has batches prepared in memory, one table of states, autograd,
clipping, AdamW, and reads a number from the device every `LOG_INTERVAL` steps. Losses must agree at every step.

Memory is measured in two fresh processes, where the bare loop reads the data set's batches as it runs.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bench_table import Figure, bench_parser, in_child, over, print_figures, ratio_figure
from trainer_run import ALONE, LOG_INTERVAL, TINY, StepWatcher, plan_of, run_trainer

from trainer.arrays import IGNORED
from trainer.data.batch import MicroBatch
from trainer.data.loader import Loader
from trainer.distributed.strategy import compile_blocks
from trainer.training.setup.parts import autocast_context, make_blend
from trainer.training.setup.plan import Plan, build_model, width_of
from trainer.training.step.optimizer import build_optimizer
from trainer.training.step.schedule import lr_at, set_lr

GOALS = {"cpu": 0.97, "cuda": 0.99}
MAX_MEMORY = 1.05


class BareLoop:
    """The step of a hand-written loop."""

    def __init__(self, plan: Plan, device: torch.device, batches: Iterable[MicroBatch]) -> None:
        config = plan.config
        self._config = config
        self._device = device
        torch.manual_seed(config.run.seed)
        self._model = build_model(config.model, plan.vocab_size).to(device)
        width = width_of(self._model)
        if config.train.compile:
            compile_blocks(self._model)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self._autocast = autocast_context(config, device)
        self._parameters = list(self._model.parameters())
        self._micros = iter(batches)
        self._rows: dict[int, int] = {}
        self._table = torch.zeros(config.ledger.capacity, width, device=device)  # [capacity, state_width]
        self._step = 0

    def _places(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Table rows of the batch's groups, and whether each group continues: [B] int64, [B, 1] float."""
        assert micro.carry is not None
        groups = micro.carry.group_ids.tolist()
        rows = [self._rows.setdefault(group, len(self._rows) % len(self._table)) for group in groups]
        continues = torch.from_numpy((micro.carry.cell_index > 0).astype(np.float32))
        return torch.tensor(rows).to(self._device), continues[:, None].to(self._device)

    def step(self) -> torch.Tensor:
        """One optimizer step; the loss, still on the device."""
        self._step += 1
        window = [next(self._micros) for _ in range(self._config.micro_batches.first)]
        num_tokens = sum((micro.targets != IGNORED).sum() for micro in window)
        total = torch.zeros((), device=self._device)
        for micro in window:
            rows, continues = self._places(micro)
            with self._autocast():
                output = self._model(**micro.inputs, state=self._table[rows] * continues)
                logits = output.logits.flatten(0, 1).float()
                loss = F.cross_entropy(logits, micro.targets.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = loss / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            self._table[rows] = output.state.detach().float()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._config.train.clip_grad_norm)
        config = self._config
        lr = lr_at(self._step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


class Alternating(StepWatcher):
    """After each step of the trainer it runs one of the bare loop, and times both."""

    def __init__(self, bare: BareLoop | None, device: torch.device) -> None:
        self._bare = bare
        self._device = device
        self.ours: list[float] = []
        self.bare: list[float] = []
        self._began = time.perf_counter()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def update(self, step: int, loss: float) -> None:
        """Called after each step of the trainer."""
        ended = self._now()
        self.ours.append(ended - self._began)
        if self._bare is not None:
            started = time.perf_counter()
            bare_loss = self._bare.step()
            if step % LOG_INTERVAL == 0:
                bare_loss.item()
            self.bare.append(self._now() - started)
            tolerance = 1e-3 if self._device.type == "cpu" else 5e-2
            assert math.isclose(loss, float(bare_loss), rel_tol=tolerance), (step, loss, float(bare_loss))
        self._began = time.perf_counter()


def batches_of(plan: Plan, device: torch.device) -> Iterator[MicroBatch]:
    """The batches that the trainer will read, one by one."""
    return Loader(make_blend(plan, ALONE), device=device, prefetch=0)


def ready_batches(plan: Plan, device: torch.device) -> list[MicroBatch]:
    """All batches of the run, in memory."""
    needed = plan.config.train.steps * plan.config.micro_batches.first
    return [batch for batch, _ in zip(batches_of(plan, device), range(needed), strict=False)]


def measure(args: argparse.Namespace) -> list[Figure]:
    """Speed and memory, as figures."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = plan_of(folder, args.config, steps=args.steps, device=args.device, sets=args.sets)
        times = Alternating(BareLoop(plan, device, ready_batches(plan, device)), device)
        run_trainer(plan, folder, device, times)
    # Blocks from one logged step to the next: a logged step is read at once and the others one step later, so within a block
    # the times between two calls are not those of one step.
    blocks = [slice(first, first + LOG_INTERVAL) for first in range(LOG_INTERVAL, args.steps, LOG_INTERVAL)]
    ours, theirs = ([sum(each[block]) / LOG_INTERVAL for block in blocks] for each in (times.ours, times.bare))
    memory = [
        [in_child("--only", loop, "--steps", "12") for loop in ("trainer", "bare")] for _ in range(args.memory_rounds)
    ]
    growth = [ours_mib / bare_mib for ours_mib, bare_mib in memory]
    goal = GOALS[device.type]
    return [
        ratio_figure("tokens per second, trainer over bare loop", over(theirs, ours), at_least=goal),
        Figure("seconds per step: trainer", statistics.median(ours), "s"),
        Figure("seconds per step: bare loop", statistics.median(theirs), "s"),
        ratio_figure("peak memory, trainer over bare loop", growth, at_most=MAX_MEMORY),
    ]


def only(loop: str, args: argparse.Namespace) -> None:
    """Run one of the loops and print this process's peak memory in MiB (of the device on CUDA)."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(Path(name), args.config, steps=args.steps, device=args.device, sets=args.sets)
        if loop == "trainer":
            run_trainer(plan, Path(name), device, Alternating(None, device))
        else:
            bare = BareLoop(plan, device, batches_of(plan, device))
            for _ in range(args.steps):
                bare.step()
    if device.type == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__, device="cpu", sets=True)
    parser.add_argument("--config", type=Path, help="config of the run (default: 17.6 M parameters on synthetic text)")
    parser.add_argument("--tiny", action="store_true", help="shrink the config's model and batches: a rehearsal")
    parser.add_argument("--steps", type=int, default=120, help="steps of each loop, a multiple of the log interval, 10")
    parser.add_argument("--memory-rounds", type=int, default=3, help="pairs of processes to measure memory")
    parser.add_argument("--only", choices=["trainer", "bare"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sets = [*(TINY if args.tiny else ()), *args.sets]
    torch.set_num_threads(torch.get_num_threads() if args.device == "cuda" else 1)
    if args.only:
        only(args.only, args)
        return
    print_figures("loop", measure(args), args)


if __name__ == "__main__":
    main()
