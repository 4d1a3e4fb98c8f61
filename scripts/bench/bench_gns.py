"""Overhead of the noise scale per step: with over without its hooks, alternating in one run, by micro-batches per step.

One process trains the reference model (10.4 million parameters) on random bytes, on one thread, in CPU time (on CUDA: wall
time, under bf16 autocast). Steps without hooks, with hooks and with the snapshot recipe (gradients are copied after every
backward and subtracted) alternate in random order on the same weights and data; each round gives one ratio. "inside the hooks
alone" is the hooks' time in these steps over a step without them, which other load does not disturb. Memory: growth
of the peak resident set over two steps on one short row.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from bench_table import Figure, bench_parser, growth_mb, in_child, ratio_figure, run_bench
from torch import Tensor, nn

from trainer.metrics.gradient_noise import GradientNoiseScale, norms_of, square_sum
from trainer.model.encoder import build

VOCAB = 256
HOOKS_GOAL = {"cpu": 1.02, "cuda": 1.005}
KINDS = ("none", "hooks", "snapshot")


class TimedNoiseScale(GradientNoiseScale):
    """Accumulates the time inside the hooks and the calls between them."""

    def __init__(self, model: nn.Module, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.own_seconds = 0.0
        super().__init__(model)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._clock()
        yield
        self.own_seconds += self._clock() - began

    def _measure(self, index: int, grad: Tensor) -> None:
        with self._timed():
            super()._measure(index, grad)

    def _accumulated(self, parameter: Tensor) -> None:
        with self._timed():
            super()._accumulated(parameter)

    def end_micro(self, kappa: float | Tensor, example_weights: Tensor | int) -> None:
        with self._timed():
            super().end_micro(kappa, example_weights)

    def take(self, grad_sq: Tensor) -> None:
        """Finish a window with the square norm measured for clipping."""
        with self._timed():
            *sums, square = torch.cat([self.local_sums(), grad_sq.reshape(1)]).tolist()
            self.finish(sums, square)


class Snapshots:
    """The usual recipe: flatten `.grad` after each backward, take the difference, square in fp64."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.before: Tensor | None = None  # of the window
        self.sum_sq = 0.0

    def measure(self) -> None:
        snapshot = torch.cat([p.grad.detach().float().flatten() for p in self._parameters if p.grad is not None])
        micro = snapshot if self.before is None else snapshot - self.before
        self.before = snapshot
        self.sum_sq += float((micro.double() * micro.double()).sum().item())


class Bench:
    """A model, its optimizer and the ways of measuring."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._is_cuda = args.device == "cuda"
        self._clock = time.perf_counter if self._is_cuda else time.process_time
        self.model = build(VOCAB, args.dim, args.layers).to(args.device)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.gns = TimedNoiseScale(self.model, self._clock)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._snapshots = Snapshots(self.model)
        self._rows = torch.randint(VOCAB, (args.rows, args.seq_len + 1)).to(args.device)

    def step(self, kind: str, m: int) -> float:
        """One optimizer step; its seconds."""
        began = self._now()
        if kind == "hooks":
            self.gns.begin_window(m)
        for k in range(m):
            with torch.autocast("cuda", torch.bfloat16, enabled=self._is_cuda):
                logits = self.model(self._rows[:, :-1]).logits
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB).float(), self._rows[:, 1:].reshape(-1)) / m
            if kind == "hooks":
                self.gns.begin_micro(last=k == m - 1)
            loss.backward()  # type: ignore[no-untyped-call]
            if kind == "hooks":
                self.gns.end_micro(1 / m, len(self._rows))
            elif kind == "snapshot":
                self._snapshots.measure()
        # As in the trainer's step: clipping measures the gradient with the same kernel, and the noise scale reuses that.
        grad_sq = square_sum(norms_of([p.grad for p in self.model.parameters() if p.grad is not None]))
        if kind == "hooks":
            self.gns.take(grad_sq)
        elif kind == "snapshot":
            self._snapshots.before = None
        shrink = min(1.0, 1.0 / (math.sqrt(float(grad_sq)) + 1e-6))
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], shrink)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._now() - began

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._clock()


def ratios(bench: Bench, m: int, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Per round, the seconds of "hooks" and "snapshot" over those of "none"; "own": 1 + the share of the hooks themselves."""
    result: dict[str, list[float]] = {"hooks": [], "snapshot": [], "own": []}
    for number in range(rounds + 1):
        before = bench.gns.own_seconds
        seconds = {kind: bench.step(kind, m) for kind in rng.sample(KINDS, len(KINDS))}
        if number == 0:
            continue  # warm-up
        result["own"].append(1.0 + (bench.gns.own_seconds - before) / seconds["none"])
        for kind in KINDS[1:]:
            result[kind].append(seconds[kind] / seconds["none"])
    return result


def peak_growth(args: argparse.Namespace, kind: str) -> float:
    """Growth of the peak memory in MB over two steps of m = 2, after one without any measuring."""
    args.rows, args.seq_len = 1, 16  # so that activations do not hide it
    bench = Bench(args)
    return growth_mb(lambda: bench.step("none", 2), lambda: [bench.step(kind, 2) for _ in range(2)], args.device)


def figures(args: argparse.Namespace) -> list[Figure]:
    """Step times by number of micro-batches, and memory."""
    bench = Bench(args)
    found: list[Figure] = [Figure("parameters", bench.num_parameters)]
    rng = random.Random(0)
    for m in args.micro_batches:
        each = ratios(bench, m, max(args.rounds * min(8 // m, 4), 2), rng)
        found += [
            ratio_figure(f"m={m}: step time, with hooks over without", each["hooks"], at_most=HOOKS_GOAL[args.device]),
            ratio_figure(f"m={m}: by time inside the hooks alone", each["own"]),
            ratio_figure(f"m={m}: snapshot recipe over without", each["snapshot"]),
        ]
    size = bench.num_parameters * 4 / 1e6
    found.append(Figure("one copy of the gradients", size, "MB"))
    for kind in KINDS:
        goal = 0.1 * size if kind == "hooks" else None
        growth = in_child(peak_growth, args, kind)
        found.append(Figure(f"peak memory beyond the first step: {kind}", growth, "MB", at_most=goal))
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of m = 8; fewer micro-batches get more")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--dim", type=int, default=480)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows per micro-batch")
    parser.add_argument("--seq-len", type=int, default=128)
    run_bench("gns", parser, figures)
