"""Overhead of the noise scale per step: with over without its hooks, alternating in one run, by micro-batches per step.

One process trains the reference model (10.4 million parameters) on random bytes. Steps without hooks, with hooks, with
everything that steps which log can measure (`metrics.per_layer`, and `gns.components_every`, which runs each micro-batch in two
halves) and with the snapshot recipe (the gradients are copied after every
backward, and each micro-gradient is a difference) alternate in an order drawn anew for every round, on the same weights and
data, so that other load on the machine affects all alike. "Everything on, every step logged" is the worst case; "every 10th" is
nine steps with hooks and one with everything, from the same round. A
round gives one ratio; the table shows the median ratio and its quartiles. The micro-batch size is fixed, so m = 8 is four
times the work of m = 2. "inside the hooks alone" is the time that the hooks themselves took, measured in the same steps,
relative to a step without them: it is not a difference of two long times, so it is robust on a busy machine.

As in the trainer's step, clipping measures the gradient in every kind of step, and the noise scale reuses that number; a
loop that calls `GradientNoiseScale.step` and clips by other means pays for one more pass over the gradients.

Times are the process's CPU time: it has one thread and waits for nothing, so on an idle machine this equals wall time,
and on a busy one it excludes the waiting. --clock wall measures wall time. On CUDA it is wall time until the device is done,
under bf16 autocast; what the hooks alone take is there the time in which they keep the host.

Memory is the growth of the peak resident set over two steps on one short row, after one step without any measuring. The sample
of the weights is in it from the start.

In steps without hooks the hooks stay registered and return at once, because no micro-batch was begun.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from bench_table import Figure, peak_mb, print_figures, ratio_figure
from torch import Tensor, nn

from trainer.extensions.noise_components import NoiseComponents, Piece, normal_equations
from trainer.extensions.per_layer import PerLayer
from trainer.metrics.noise_scale.hooks import GradientNoiseScale, square_norm
from trainer.model import build

VOCAB = 256
GOAL = 1.02
HOOKS_GOAL = {"cpu": 1.02, "cuda": 1.005}
KINDS = ("none", "hooks", "all", "snapshot")
MEASURED = ("hooks", "all")
LOG_INTERVAL = 10


class TimedNoiseScale(GradientNoiseScale):
    """Accumulates the time inside the hooks and the calls between them."""

    def __init__(self, model: nn.Module, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.own_seconds = 0.0
        super().__init__(model)

    def _measure(self, index: int, grad: Tensor) -> None:
        began = self._clock()
        super()._measure(index, grad)
        self.own_seconds += self._clock() - began

    def _accumulated(self, parameter: Tensor) -> None:
        began = self._clock()
        super()._accumulated(parameter)
        self.own_seconds += self._clock() - began

    def end_micro(self, kappa: float | Tensor, example_weights: Tensor | int) -> None:
        """Time the original."""
        began = self._clock()
        super().end_micro(kappa, example_weights)
        self.own_seconds += self._clock() - began

    def take(self, grad_sq: Tensor) -> None:
        """Finish a window with the square norm measured for clipping."""
        began = self._clock()
        *sums, square = torch.cat([self.local_sums(), grad_sq.reshape(1)]).tolist()
        self.finish(sums, square)
        self.own_seconds += self._clock() - began


class Snapshots:
    """The usual recipe: flatten `.grad` after each backward, take the difference, square in fp64."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._before: Tensor | None = None
        self.sum_sq = 0.0

    def measure(self) -> None:
        """After a backward."""
        snapshot = torch.cat([p.grad.detach().float().flatten() for p in self._parameters if p.grad is not None])
        micro = snapshot if self._before is None else snapshot - self._before
        self._before = snapshot
        self.sum_sq += float((micro.double() * micro.double()).sum().item())

    def reset(self) -> None:
        """After a window."""
        self._before, self.sum_sq = None, 0.0


class Bench:
    """A model, its optimizer and the ways of measuring."""

    def __init__(self, args: argparse.Namespace, clock: Callable[[], float]) -> None:
        torch.manual_seed(0)
        self._clock = clock
        self._is_cuda = args.device == "cuda"
        self.model = build(VOCAB, args.dim, args.layers).to(args.device)
        self.gns = TimedNoiseScale(self.model, clock)
        self._components = NoiseComponents()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._layers = PerLayer(self.model, self._optimizer, self.gns)
        self._snapshots = Snapshots(self.model)
        self._rows = torch.randint(VOCAB, (args.rows, args.seq_len + 1)).to(args.device)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(p.numel() for p in self.model.parameters())

    def step(self, kind: str, m: int) -> float:
        """One optimizer step; its seconds."""
        began = self._now()
        if kind in MEASURED:
            self.gns.begin_window(m, pairs=kind == "all", by_parameter=kind == "all")
        pieces = m * (list(self._rows.chunk(2)) if kind == "all" else [self._rows])
        for k, rows in enumerate(pieces):
            with torch.autocast("cuda", torch.bfloat16, enabled=self._is_cuda):
                logits = self.model(rows[:, :-1]).logits
            losses = nn.functional.cross_entropy(logits.reshape(-1, VOCAB).float(), rows[:, 1:].reshape(-1))
            loss = losses / len(pieces)
            if kind in MEASURED:
                self.gns.begin_micro(last=k == len(pieces) - 1)
            loss.backward()  # type: ignore[no-untyped-call]
            if kind in MEASURED:
                self.gns.end_micro(1 / len(pieces), len(rows))
            elif kind == "snapshot":
                self._snapshots.measure()
        # As in the trainer's step: clipping measures the gradient with the same kernel, and what is measured reuses that.
        squares = {p: square_norm(p.grad) for p in self.model.parameters() if p.grad is not None}
        grad_sq = torch.stack(list(squares.values())).sum()
        if kind in MEASURED:
            self.gns.take(grad_sq)
        elif kind == "snapshot":
            self._snapshots.reset()
        if kind == "all":
            self._timed(lambda: self._layers.before_update(squares))
            self._timed(lambda: self._compare(pieces))
        shrink = min(1.0, 1.0 / (math.sqrt(float(grad_sq)) + 1e-6))
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], shrink)
        self._optimizer.step()
        if kind == "all":
            self._timed(lambda: self._layers.step(grad_factor=1.0))
        self._optimizer.zero_grad(set_to_none=True)
        return self._now() - began

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._clock()

    def _compare(self, rows: Sequence[Tensor]) -> None:
        """Take in where the noise comes from, as the trainer's step does."""
        norms = self.gns.pair_norms()
        assert norms is not None
        kappas, squares, sums = norms.T.tolist()
        pieces = [Piece(number // 2, range(len(each)), [1.0] * len(each)) for number, each in enumerate(rows)]
        equations = normal_equations(pieces, kappas, squares, sums)
        self._components.update(equations.tolist(), squares[0], 1.0, 0.0)

    def _timed(self, part: Callable[[], object]) -> None:
        began = self._clock()
        part()
        self.gns.own_seconds += self._clock() - began


def ratios(bench: Bench, m: int, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Per round, each kind's seconds relative to "none"; "none" has absolute seconds, "own hooks" and "own all" are 1 + the
    share of what measures itself."""
    result: dict[str, list[float]] = {kind: [] for kind in (*KINDS, *(f"own {kind}" for kind in MEASURED))}
    for number in range(rounds + 1):
        seconds, own = {}, {}
        for kind in rng.sample(KINDS, len(KINDS)):
            before = bench.gns.own_seconds
            seconds[kind] = bench.step(kind, m)
            own[kind] = bench.gns.own_seconds - before
        if number == 0:
            continue  # warm-up
        result["none"].append(seconds["none"])
        for kind in MEASURED:
            result[f"own {kind}"].append(1.0 + own[kind] / seconds["none"])
        for kind in KINDS[1:]:
            result[kind].append(seconds[kind] / seconds["none"])
    return result


def mixed(hooks: Sequence[float], layers: Sequence[float]) -> list[float]:
    """Ratios of a run in which every `LOG_INTERVAL`th step measures its layers."""
    return [a + (b - a) / LOG_INTERVAL for a, b in zip(hooks, layers, strict=True)]


def peak_growth(make: Callable[[], Bench], kind: str, device: str) -> float:
    """Growth of the peak memory in MB over two steps of m = 2, after one without any measuring."""
    bench = make()
    bench.step("none", 2)
    before = peak_mb(device)
    for _ in range(2):
        bench.step(kind, 2)
    return peak_mb(device) - before


def growth_in_child(kind: str, arguments: argparse.Namespace) -> float:
    """`peak_growth` in a separate process, in MB; on one short row, so that activations do not hide it."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("dim", "layers", "threads", "device")]
    command = [sys.executable, __file__, f"--memory-of={kind}", "--rows=1", "--seq-len=16", *sizes]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def figures(bench: Bench, args: argparse.Namespace) -> list[Figure]:
    """Step times by number of micro-batches, and memory."""
    found: list[Figure] = [Figure("parameters", bench.num_parameters)]
    rng = random.Random(0)
    for m in args.micro_batches:
        each = ratios(bench, m, max(args.rounds * min(8 // m, 4), 2), rng)
        found += [
            ratio_figure(f"m={m}: step time, with hooks over without", each["hooks"], at_most=HOOKS_GOAL[args.device]),
            ratio_figure(f"m={m}: by time inside the hooks alone", each["own hooks"]),
            ratio_figure(
                f"m={m}: everything on, every {LOG_INTERVAL}th step logged",
                mixed(each["hooks"], each["all"]),
                at_most=GOAL,
            ),
            ratio_figure(f"m={m}: the same by time inside alone", mixed(each["own hooks"], each["own all"])),
            ratio_figure(f"m={m}: everything on, every step logged", each["all"]),
            ratio_figure(f"m={m}: the same by time inside alone, every step logged", each["own all"]),
            ratio_figure(f"m={m}: snapshot recipe over without", each["snapshot"]),
        ]
    size = bench.num_parameters * 4 / 1e6
    found.append(Figure("one copy of the gradients", size, "MB"))
    for kind in KINDS:
        goal = 0.1 * size if kind in MEASURED else None
        found.append(
            Figure(f"peak memory beyond the first step: {kind}", growth_in_child(kind, args), "MB", at_most=goal)
        )
    return found


def main() -> None:
    """Measure and print; exits with 1 when --check is given and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of m = 8; fewer micro-batches get more")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dim", type=int, default=480)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows per micro-batch")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every goal is met")
    parser.add_argument("--memory-of", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def make() -> Bench:
        is_cpu_time = args.clock == "cpu" and args.device == "cpu"
        return Bench(args, time.process_time if is_cpu_time else time.perf_counter)

    if args.memory_of:
        print(peak_growth(make, args.memory_of, args.device))
        return
    print_figures("gns", figures(make(), args), as_json=args.json, check=args.check)


if __name__ == "__main__":
    main()
