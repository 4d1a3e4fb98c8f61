"""Checks the noise scale's prediction: steps to a given loss at batch sizes B/4, B and 4B against (1 + B/batch).

Every run has the same budget of sequences, drawn independently from the corpus (`make data`) as the theory assumes, and
ends at the target. The model is the reference model without carried state. For each batch size the learning rate is the
best of a grid on the first seed (the theory is about tuned rates); the other seeds reuse it. B is measured by the hooks in
the runs at the middle batch size, until they reach the target.

    python scripts/gns_batch_sizes.py --out build/gns_batch_sizes.json
    python scripts/gns_batch_sizes.py --out build/gns_batch_sizes.json --plot docs/images/gns_batch_sizes.png

Results already in the file are reused, so the script can be interrupted and restarted.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trainer.model.build import build

SEQ_LEN = 64
HELD_OUT_SEQUENCES = 192
NUM_EVALUATIONS = 64
RATES = tuple(1e-3 * 2.0 ** (k / 2) for k in range(14))
VOCAB = 256
TUNED_ON = 2  # seeds
SMOOTHED = 9


@dataclass(frozen=True)
class Setting:
    """One run."""

    dim: int
    num_layers: int
    batch: int
    lr: float
    seed: int
    sequences: int
    """Budget of training sequences."""
    target: float = 0.0
    """Held-out loss at which the run ends."""

    @property
    def name(self) -> str:
        """Key in the results file."""
        size = f"dim={self.dim} layers={self.num_layers} sequences={self.sequences}"
        return f"{size} batch={self.batch} lr={self.lr:g} seed={self.seed} target={self.target:.4f}"


@dataclass(frozen=True)
class Curve:
    """Measurements of a run at each evaluation."""

    steps: list[int]
    held_out: list[float]
    """Nats per byte."""
    tr_sigma: list[list[float]]
    """tr(Sigma) of each parameter, averaged over the steps since the evaluation before."""
    grad_sq: list[list[float]]
    """|G|^2 of each parameter, likewise."""
    seconds: float

    def steps_to(self, target: float) -> float | None:
        """Steps until the held-out loss first reaches `target`, interpolated; None if it never does."""
        for k, loss in enumerate(self.held_out):
            if loss <= target:
                if k == 0:
                    return float(self.steps[0])
                share = (self.held_out[k - 1] - target) / (self.held_out[k - 1] - loss)
                return self.steps[k - 1] + share * (self.steps[k] - self.steps[k - 1])
        return None

    def mean_b(self, batch: int, target: float) -> float:
        """B on the way to `target`: the ratio of the averages of tr(Sigma) and |G|^2 over `SMOOTHED` evaluations around each,
        averaged with each step's progress, 1 / (1 + B/batch), as weight."""
        until = self.steps_to(target)
        assert until is not None
        s, g = (np.array(rows).sum(axis=1) for rows in (self.tr_sigma, self.grad_sq))
        kernel = np.ones(SMOOTHED)
        b = np.convolve(s, kernel, "same") / np.convolve(g, kernel, "same")
        b = b[: sum(step <= until for step in self.steps)]
        progress = 1.0 / (1.0 + b / batch)
        return float((progress * b).sum() / progress.sum())


def read_corpus(root: Path) -> tuple[Tensor, Tensor]:
    """All texts as bytes, [N] uint8: the training documents, and every 50th document, held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    paths = sorted(root.glob("*/*.jsonl"))
    if not paths:
        raise SystemExit(f"no corpus in {root}; make it with: make data")
    number = 0
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            parts[number % 50 == 0].append(json.loads(line)["text"].encode("utf-8") + b"\n")
            number += 1
    return tuple(torch.from_numpy(np.frombuffer(b"".join(part), dtype=np.uint8).copy()) for part in parts)  # type: ignore[return-value]


def draw(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, SEQ_LEN + 1] int64: windows at independent positions."""
    starts = torch.randint(len(data) - SEQ_LEN - 1, (count, 1), generator=generator)
    return data[starts + torch.arange(SEQ_LEN + 1)].long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean nats per byte."""
    logits = model(rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))


def square_norms(tensors: Sequence[Tensor]) -> np.ndarray:
    """Square norm of each tensor, float64 [P]."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().numpy()


def run(setting: Setting, train: Tensor, held_out: Tensor) -> Curve:
    """Train from scratch. The sequences depend only on the seed, so every batch size sees the same ones."""
    began = time.perf_counter()
    torch.manual_seed(setting.seed)
    model = build(VOCAB, setting.dim, setting.num_layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr, betas=(0.9, 0.95))
    num_steps = setting.sequences // setting.batch
    every = max(num_steps // NUM_EVALUATIONS, 1)
    data_rng = torch.Generator().manual_seed(1000 + setting.seed)
    fixed = draw(held_out, HELD_OUT_SEQUENCES, torch.Generator().manual_seed(0))
    curve = Curve([], [], [], [], 0.0)
    parameters = list(model.parameters())
    small, big = np.zeros(len(parameters)), np.zeros(len(parameters))
    half = setting.batch // 2
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, step * setting.batch / (0.02 * setting.sequences))
        halves = draw(train, setting.batch, data_rng).chunk(2)
        before = [torch.zeros_like(p) for p in parameters]
        for rows in halves:
            loss = loss_of(model, rows) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad.clone() for p in parameters if p.grad is not None]
            small += 4 * square_norms(torch._foreach_sub(gradients, before)) / 2
            before = gradients
        big += square_norms(before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0:
            with torch.no_grad():
                curve.held_out.append(float(loss_of(model, fixed)))
            curve.steps.append(step)
            curve.tr_sigma.append(list((small - big) / (1 / half - 1 / setting.batch) / every))
            curve.grad_sq.append(list((2 * big - small) / every))
            small[:], big[:] = 0.0, 0.0
            if curve.held_out[-1] <= setting.target:
                break
    return Curve(**{**asdict(curve), "seconds": time.perf_counter() - began})


class Results:
    """Curves by setting, cached in a file."""

    def __init__(self, path: Path, corpus: Path) -> None:
        self._path, self._corpus = path, corpus
        self._curves = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._data: tuple[Tensor, Tensor] | None = None

    def get(self, setting: Setting) -> Curve:
        """The curve, computed if it is not cached."""
        if setting.name not in self._curves:
            self._data = self._data or read_corpus(self._corpus)
            curve = run(setting, *self._data)
            print(f"{setting.name}: loss {curve.held_out[-1]:.4f}, {curve.seconds:.0f} s", flush=True)
            self._curves[setting.name] = asdict(curve)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._curves), encoding="utf-8")
        return Curve(**self._curves[setting.name])


def best_rate(cost_at: Callable[[int], float], first: int) -> int:
    """Index in RATES of the cheapest rate: descend by factors of 2, then try half a step either way."""
    best = first
    for stride in (2, 1):
        while True:
            tries = [k for k in (best - stride, best, best + stride) if 0 <= k < len(RATES)]
            cheapest = min(tries, key=cost_at)
            if cheapest == best:
                break
            best = cheapest
            if stride == 1:
                break
    return best


@dataclass(frozen=True)
class Row:
    """One batch size, over the seeds."""

    batch: int
    lr: float
    steps: list[float]
    """Steps to the target, by seed."""
    b: list[float]
    """B on the way, by seed."""

    @property
    def mean(self) -> float:
        """Mean steps to the target."""
        return statistics.fmean(self.steps)


@dataclass(frozen=True)
class Found:
    """What the runs of one model say."""

    size: tuple[int, int]
    """Width, layers."""
    target: float
    rows: list[Row]


def measure(results: Results, size: tuple[int, int], batches: Sequence[int], sequences: int, seeds: int) -> Found:
    """Steps to the target by batch size, and B.

    The target is the loss that every seed reaches at the largest batch size, tuned for the lowest final loss; the other
    batch sizes are tuned for the fewest steps to it.
    """

    def curves(batch: int, target: float, rate: int, seeds: int) -> list[Curve]:
        settings = [Setting(*size, batch, RATES[rate], seed, sequences, target) for seed in range(seeds)]
        return [results.get(setting) for setting in settings]

    def final_loss(rate: int) -> float:
        return statistics.fmean(min(c.held_out) for c in curves(batches[-1], 0.0, rate, TUNED_ON))

    rate = best_rate(final_loss, 7)
    largest = curves(batches[-1], 0.0, rate, seeds)
    target = max(min(curve.held_out) for curve in largest)
    rows = [Row(batches[-1], RATES[rate], steps_of(largest, target), [c.mean_b(batches[-1], target) for c in largest])]
    for batch in batches[-2::-1]:

        def steps(rate: int, batch: int = batch) -> float:
            return statistics.fmean(c.steps_to(target) or math.inf for c in curves(batch, target, rate, TUNED_ON))

        rate = best_rate(steps, max(rate - 1, 0))
        found = curves(batch, target, rate, seeds)
        rows.append(Row(batch, RATES[rate], steps_of(found, target), [c.mean_b(batch, target) for c in found]))
    return Found(size, target, rows[::-1])


def steps_of(curves: list[Curve], target: float) -> list[float]:
    """Steps to the target of each curve; a run that does not reach it is an error, since the average would be biased."""
    steps = [curve.steps_to(target) for curve in curves]
    if None in steps:
        raise SystemExit(f"a run does not reach {target:.3f}; raise --sequences")
    return [s for s in steps if s is not None]


def fit(rows: list[Row], b_simple: float) -> float:
    """S_min of `steps = S_min (1 + b_simple / batch)` by least squares in the logarithm."""
    return math.exp(statistics.fmean(math.log(row.mean / (1.0 + b_simple / row.batch)) for row in rows))


def fitted_b(rows: list[Row]) -> float:
    """The B that best fits the measured steps, by a search on a fine grid."""

    def misfit(b: float) -> float:
        smallest = fit(rows, b)
        return sum(math.log(row.mean / (smallest * (1.0 + b / row.batch))) ** 2 for row in rows)

    return min((1.02**k for k in range(600)), key=misfit)


def report(target: float, rows: list[Row], of_middle: list[float]) -> None:
    """Print the table."""
    b = statistics.fmean(of_middle)
    smallest = fit(rows, b)
    print(f"target {target:.3f} nats per byte; B in the middle runs {', '.join(f'{x:.1f}' for x in of_middle)}")
    print("| batch | lr | steps to the target, by seed | mean | S_min (1 + B/batch) | measured / theory | sequences |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        theory = smallest * (1.0 + b / row.batch)
        seeds = ", ".join(f"{s:.0f}" for s in row.steps)
        print(
            f"| {row.batch} | {row.lr:.1e} | {seeds} | {row.mean:.0f} | {theory:.0f} | {row.mean / theory:.2f} "
            f"| {row.mean * row.batch:,.0f} |"
        )
    print(f"S_min {smallest:.0f} with B = {b:.1f} as measured; the steps alone imply B = {fitted_b(rows):.0f}")
    print(f"{platform.platform()}, torch {torch.__version__}")


def plot(path: Path, rows: list[Row], of_middle: list[float]) -> None:
    """Plot steps against batch size: the runs and the theory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    b = statistics.fmean(of_middle)
    smallest, alone = fit(rows, b), fitted_b(rows)
    grid = np.geomspace(rows[0].batch / 2, rows[-1].batch * 2, 100)
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axes.loglog(grid, smallest * (1 + b / grid), label=f"S_min (1 + B/batch), B = {b:.0f} as the hooks measured it")
    axes.loglog(grid, fit(rows, alone) * (1 + alone / grid), "--", label=f"the same with the best B, {alone:.0f}")
    for row in rows:
        axes.plot([row.batch] * len(row.steps), row.steps, "ko", markersize=4)
    axes.axvline(b, color="grey", linewidth=0.8)
    axes.set(xlabel="batch (sequences of 64 bytes)", ylabel="steps to the target loss")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is not cached, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("data/pytext"))
    parser.add_argument("--out", type=Path, default=Path("build/gns_batch_sizes.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--sizes", default="48x1,64x2", help="width x layers, of each model")
    parser.add_argument("--batches", default="16,32,64,128,256")
    parser.add_argument("--sequences", type=int, default=49_152, help="sequences per run")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, batches = Results(args.out, args.corpus), [int(batch) for batch in args.batches.split(",")]
    for size in args.sizes.split(","):
        dim, num_layers = map(int, size.split("x"))
        print(measure(results, (dim, num_layers), batches, args.sequences, args.seeds))


if __name__ == "__main__":
    main()
