"""Checks the noise scale's prediction: steps to a given loss at five batch sizes against S_min (1 + B/batch).

Every run has the same budget of sequences, drawn independently from the corpus (`make data`) as the theory assumes, and
ends at the target. The models are the reference model without carried state, in two sizes. The theory knows neither the
noise that a constant learning rate leaves in the weights nor a wrong learning rate, so the loss is that of averaged weights,
and for each batch size the learning rate and the span of the average are the best on two seeds; the other seeds reuse them.
B is measured by the hooks, in all runs, until they reach the target.

    python scripts/gns_batch_sizes.py

Runs that are in build/gns_batch_sizes.json are reused, so the script can be interrupted and started again.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments import Results, markdown
from torch import Tensor, nn
from torch.func import functional_call

from trainer.lab.encoder import build
from trainer.metrics.gradient_noise import GradientNoiseScale

CORPUS = Path("data/pytext")
SIZES = ((48, 1), (64, 2))  # width and layers of each model
BATCHES = (16, 32, 64, 128, 256)
SEQUENCES = 49_152  # per run
SEEDS = 5
SEQ_LEN = 64
HELD_OUT_SEQUENCES = 192
NUM_EVALUATIONS = 48
RATES = tuple(1e-3 * 2.0 ** (k / 2) for k in range(14))
VOCAB = 256
TUNED_ON = 2  # seeds
# Span of the average of weights, as the weight of the newest ones at step t: 1 / (1 + span (t - 1)).
SPANS = (0.03, 0.06, 0.12, 0.25)
PAST_TARGET = 0.01  # nats: runs end this far below the target, so that all spans that are of use reach it


@dataclass(frozen=True)
class Setting:
    """One run."""

    dim: int
    num_layers: int
    batch: int
    lr: float
    sequences: int  # budget of training sequences
    target: float = 0.0  # held-out loss at which the run ends

    @property
    def name(self) -> str:
        size = f"dim={self.dim} layers={self.num_layers} sequences={self.sequences}"
        return f"{size} batch={self.batch} lr={self.lr:g} target={self.target:.4f}"


@dataclass(frozen=True)
class Curve:
    """Measurements of a run at each evaluation."""

    steps: list[int]
    held_out: list[list[float]]  # nats per byte, of the weights averaged over each of `SPANS`
    b_now: list[float | None]  # `gns/b_now`
    seconds: float

    def steps_to(self, target: float, span: int) -> float:
        """Steps until the held-out loss first reaches `target`, interpolated; infinite if it never does."""
        losses = [each[span] for each in self.held_out]
        for at, low in enumerate(losses):
            if low <= target:
                if at == 0:
                    return float(self.steps[0])
                share = (losses[at - 1] - target) / (losses[at - 1] - low)
                return self.steps[at - 1] + share * (self.steps[at] - self.steps[at - 1])
        return math.inf

    def b_on_the_way(self, until: float, batch: int) -> tuple[float, float]:
        """B averaged up to a step, with each step's progress, 1 / (1 + B/batch), as weight; and B at that step."""
        known = [b for step, b in zip(self.steps, self.b_now, strict=True) if step <= until and b is not None]
        progress = [1.0 / (1.0 + b / batch) for b in known]
        mean = math.fsum(p * b for p, b in zip(progress, known, strict=True)) / math.fsum(progress)
        return mean, statistics.median(known[-5:])


@functools.cache
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


def loss_of(model: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))


def run(setting: Setting, seed: int, corpus: Path) -> dict[str, Any]:
    """Train from scratch; its `Curve`. The sequences depend only on the seed, so every batch size sees the same ones."""
    train, held_out = read_corpus(corpus)
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = build(VOCAB, setting.dim, setting.num_layers)
    parameters: list[Tensor] = list(model.parameters())
    averages = [[p.detach().clone() for p in parameters] for _ in SPANS]
    optimizer = torch.optim.Adam(parameters, lr=setting.lr, betas=(0.9, 0.95))
    gns = GradientNoiseScale(model, weights_are_tokens=False)
    num_steps = setting.sequences // setting.batch
    every = max(num_steps // NUM_EVALUATIONS, 1)
    data_rng = torch.Generator().manual_seed(1000 + seed)
    fixed = draw(held_out, HELD_OUT_SEQUENCES, torch.Generator().manual_seed(0))
    curve = Curve([], [], [], 0.0)
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, step * setting.batch / (0.02 * setting.sequences))
        gns.begin_window(2)
        for k, rows in enumerate(draw(train, setting.batch, data_rng).chunk(2)):
            loss = loss_of(model, rows) / 2
            gns.begin_micro(last=k == 1)
            loss.backward()  # type: ignore[no-untyped-call]
            gns.end_micro(1 / 2, len(rows))
        gns.finish(gns.local_sums().tolist(), float(gns.grad_sq()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for span, average in zip(SPANS, averages, strict=True):
                torch._foreach_lerp_(average, parameters, 1.0 / (1.0 + span * (step - 1)))
        if step % every == 0:
            now = gns.history.current()
            curve.steps.append(step)
            curve.b_now.append(now.ratio.value if now is not None else None)
            curve.held_out.append([loss_with(model, average, fixed) for average in averages])
            if min(curve.held_out[-1]) <= setting.target - PAST_TARGET:
                break
    return {**asdict(curve), "seconds": time.perf_counter() - began}


@torch.no_grad()
def loss_with(model: nn.Module, weights: list[Tensor], rows: Tensor) -> float:
    """The loss with these weights instead of the model's."""
    named = {name: weight for (name, _), weight in zip(model.named_parameters(), weights, strict=True)}
    return float(loss_of(functools.partial(functional_call, model, named), rows))


def best_rate(cost_at: Callable[[int], float], first: int) -> int:
    """Index in RATES of the cheapest rate: descend by factors of 2, then try half a step either way."""

    def cheapest(at: int, stride: int) -> int:
        return min((k for k in (at - stride, at, at + stride) if 0 <= k < len(RATES)), key=cost_at)

    best = first
    while (better := cheapest(best, 2)) != best:
        best = better
    return cheapest(best, 1)


@dataclass(frozen=True)
class Row:
    """One batch size, over the seeds."""

    batch: int
    lr: float
    span: float
    steps: list[float]  # steps to the target, by seed
    b_mean: list[float]  # B on the way, by seed; see `Curve.b_on_the_way`
    b_end: list[float]  # B at the target, by seed

    @property
    def mean(self) -> float:
        return statistics.fmean(self.steps)


def measure(
    results: Results, corpus: Path, size: tuple[int, int], batches: Sequence[int], sequences: int, seeds: int
) -> tuple[float, list[Row]]:
    """The target, and steps to it by batch size, and B. `size`: width and layers of the model.

    The target is the loss that every seed reaches at the largest batch size, tuned for the lowest final
    loss; the other batch sizes are tuned for the fewest steps to it.
    """

    def curves(batch: int, target: float, rate: int, seeds: int) -> list[Curve]:
        setting = Setting(*size, batch, RATES[rate], sequences, target)
        results.complete([setting], seeds, lambda setting, seed: run(setting, seed, corpus), jobs=1)
        return [Curve(**results.of(setting, seed)) for seed in range(seeds)]

    def lowest(curve: Curve) -> float:
        return min(map(min, curve.held_out))

    def row_of(batch: int, rate: int, found: list[Curve], target: float) -> Row:
        def cost(span: int) -> float:
            return statistics.fmean(c.steps_to(target, span) for c in found[:TUNED_ON])

        span = min(range(len(SPANS)), key=cost)
        steps = [curve.steps_to(target, span) for curve in found]
        if math.inf in steps:
            raise SystemExit(f"batch {batch}: a run does not reach {target:.3f}; it needs more sequences")
        means, ends = zip(*(c.b_on_the_way(s, batch) for c, s in zip(found, steps, strict=True)), strict=True)
        return Row(batch, RATES[rate], SPANS[span], steps, list(means), list(ends))

    rate = best_rate(lambda rate: statistics.fmean(map(lowest, curves(batches[-1], 0.0, rate, TUNED_ON))), 8)
    largest = curves(batches[-1], 0.0, rate, seeds)
    target = max(map(lowest, largest))
    rows = [row_of(batches[-1], rate, largest, target)]
    for batch in batches[-2::-1]:

        def cost(rate: int, batch: int = batch) -> float:
            tried = curves(batch, target, rate, TUNED_ON)
            return min(statistics.fmean(c.steps_to(target, span) for c in tried) for span in range(len(SPANS)))

        rate = best_rate(cost, max(rate - 1, 0))
        rows.append(row_of(batch, rate, curves(batch, target, rate, seeds), target))
    return target, rows[::-1]


def fit(rows: list[Row], b_simple: float) -> float:
    """S_min of `steps = S_min (1 + b_simple / batch)` by least squares in the logarithm."""
    return math.exp(statistics.fmean(math.log(row.mean / (1.0 + b_simple / row.batch)) for row in rows))


def fitted_b(rows: list[Row]) -> float:
    """The B that best fits the measured steps, by a search on a fine grid."""

    def misfit(b: float) -> float:
        smallest = fit(rows, b)
        return sum(math.log(row.mean / (smallest * (1.0 + b / row.batch))) ** 2 for row in rows)

    return min((1.02**k for k in range(600)), key=misfit)


def report(size: str, target: float, rows: list[Row]) -> None:
    mean = statistics.fmean(b for row in rows for b in row.b_mean)
    end = statistics.fmean(b for row in rows for b in row.b_end)
    implied = fitted_b(rows)
    smallest = fit(rows, implied)
    print(f"width x layers {size}: target {target:.3f} nats per byte")
    steps = ("steps to the target, by seed", "mean", "fitted theory", "B on the way", "B at the end")
    cells = []
    for row in rows:
        seeds = ", ".join(f"{s:.0f}" for s in row.steps)
        theory = smallest * (1.0 + implied / row.batch)
        counts = (row.mean, theory, statistics.fmean(row.b_mean), statistics.fmean(row.b_end), row.mean * row.batch)
        cells.append((row.batch, f"{row.lr:.1e}", f"{row.span:g}", seeds, *(f"{count:,.0f}" for count in counts)))
    print(markdown(("batch", "lr", "span", *steps, "sequences"), cells))
    found = f"measured on the way {mean:.0f}, at the end {end:.0f}"
    print(f"the steps imply B = {implied:.0f}, S_min = {smallest:.0f}; {found}")


def main() -> None:
    torch.set_num_threads(1)
    results = Results(Path("build/gns_batch_sizes.json"))
    for dim, num_layers in SIZES:
        report(f"{dim}x{num_layers}", *measure(results, CORPUS, (dim, num_layers), BATCHES, SEQUENCES, SEEDS))
    print(f"{platform.platform()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
