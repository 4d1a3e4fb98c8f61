"""One injected fault for each rule: made by a real part of the trainer where that is cheap, in the rows otherwise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.metric_streams import add_restarts, healthy_scenario, write_run
from tests.support.records import Rows
from trainer.lab.stream_mixing import StreamMixingDataset
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.runs.load import load_run

ONSET = 100  # the step at which faults that begin during a run begin
EARLY = 23  # before a modality has shown its share


@dataclass(frozen=True)
class Fault:
    """A fault and the rule that has to find it."""

    rule: str
    what: str  # was done, for the table
    make: Callable[[int, Path], Path]  # the record of a run with the fault, for a seed, in a directory
    onset: int  # the step before which nothing is wrong
    within: int  # steps from the onset until it has to be found


def detected_after(fault: Fault, run_dir: Path) -> int | None:
    """Steps from the onset to the first logged step with which the rule finds the fault; None: not even with all rows."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    part = run_dir / "part"
    part.mkdir(exist_ok=True)
    for name in ("config.resolved.toml", "env.json", "status.json", "events.jsonl"):
        if (run_dir / name).exists():
            (part / name).write_bytes((run_dir / name).read_bytes())

    def is_found(count: int) -> bool:
        (part / "metrics.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
        found = diagnose(load_run(part))
        return fault.rule in {ruling.rule.name for ruling in [*found.findings, *found.advice]}

    if not is_found(len(lines)):
        return None
    low, high = 1, len(lines)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_found(middle) else (middle + 1, high)
    return max(int(json.loads(lines[low - 1])["global_step"]) - fault.onset, 0)


def _scenario(**changes: Any) -> Callable[[int, Path], Path]:
    return lambda seed, path: write_run(healthy_scenario(seed, **changes), path)


def _rows(change: Callable[[random.Random, Rows], None], **changes: Any) -> Callable[[int, Path], Path]:
    """A healthy run whose rows are changed afterwards."""

    def make(seed: int, path: Path) -> Path:
        rng = random.Random(f"fault {seed}")
        return write_run(healthy_scenario(seed, on_rows=lambda rows: change(rng, rows), **changes), path)

    return make


def _late(rows: Rows) -> list[int]:
    return [step for step in sorted(rows) if step >= ONSET]


def _stick(step: int, dataset: StreamMixingDataset) -> None:
    """From the onset on the reader in slot 0 is never picked, though its weight says otherwise."""
    pool = dataset._pool
    if step != ONSET or not pool.readers:
        return
    original, stuck = pool.choose, max(pool.readers, key=lambda reader: reader.remaining_picks)

    def choose(uniforms: Iterable[float]) -> list[int]:
        left, (uniform,) = [reader.remaining_picks for reader in pool.readers], uniforms
        if len(left) == 1 or stuck not in pool.readers:
            return original([uniform])
        slot = pool.readers.index(stuck)
        before, total = sum(left[:slot]), sum(left)
        place = uniform * (total - left[slot])
        place += left[slot] if place >= before else 0.0
        return original([place / total])

    pool.choose = choose  # type: ignore[method-assign]


def _starve(step: int, dataset: StreamMixingDataset) -> None:
    """From early on streams of modality b do not come in any more."""
    if step != EARLY:
        return
    original = dataset._next_reader

    def next_reader() -> Any:
        absences = dataset._pool.absences.copy()
        while (reader := original()) is not None and reader.stream.modality == "b":
            dataset._pool.absences = absences.copy()
        return reader

    dataset._next_reader = next_reader  # type: ignore[method-assign]


def _spoil_states(step: int, states: torch.Tensor) -> None:
    if step == ONSET:
        states[0] = math.nan


def _by_depth(*gains: float) -> Callable[[random.Random, Rows], None]:
    """Evaluations with these gains of carrying from 128, 256, ... tokens on."""

    def add(rng: random.Random, rows: Rows) -> None:
        for step in list(rows)[:: max(len(rows) // 20, 1)]:
            row, error = rows[step], 1e-3
            for index, gain in enumerate((gains[0], *gains)):
                key = f"eval/depth/{64 << index}" if index else "eval/depth/beyond_cell"
                row |= {f"{key}/loss": 2.0} if index else {}
                row |= {f"{key}/carry_gain": rng.gauss(gain, error), f"{key}/carry_gain_se": error}

    return add


def _empty(rng: random.Random, rows: Rows) -> None:
    for row in rows.values():
        row["data/fill"] = rng.uniform(0.2, 0.95)


def _nan(_: random.Random, rows: Rows) -> None:
    row = rows[_late(rows)[0]]
    row["loss"] = math.nan
    row["non_finite_steps"] = 1.0


def _spike(rng: random.Random, rows: Rows) -> None:
    steps = _late(rows)
    learnt = rows[min(rows)]["loss"] - rows[steps[0]]["loss"]
    for index, step in enumerate(steps[: rng.choice((1, 2, 3))]):
        rows[step]["loss"] += rng.uniform(0.8, 1.2) * learnt * 0.7**index


def _diverge(rng: random.Random, rows: Rows) -> None:
    """All rows but the first lie at several times its loss, and fall as they did."""
    first, *others = sorted(rows)
    factor = rng.uniform(3, 50)
    for step in others:
        rows[step]["loss"] = factor * (rows[first]["loss"] + rows[step]["loss"])


def _wait_for_data(rng: random.Random, rows: Rows) -> None:
    for step in _late(rows):
        wait = rows[step]["step_time_sec"] * rng.uniform(0.5, 1.5)
        rows[step]["time/data_sec"] += wait
        rows[step]["step_time_sec"] += wait


def _straggle(rng: random.Random, rows: Rows) -> None:
    share = rng.uniform(0.6, 1.0)
    for step in sorted(rows):
        wait = rows[step]["step_time_sec"] * share
        rows[step]["time/slowest_rank_sec"] += wait
        rows[step]["step_time_sec"] += wait


def _restart_often(seed: int, path: Path) -> Path:
    run = write_run(healthy_scenario(seed, log_interval=1), path)
    rng = random.Random(f"fault {seed}")
    if rng.random() < 0.5:  # a crash that repeats
        add_restarts(run, [(ONSET + 1, ONSET)] * 3)
    else:  # checkpoints too far apart
        add_restarts(run, [(ONSET + 30, ONSET)])
    return run


def _fail(seed: int, path: Path) -> Path:
    run = write_run(healthy_scenario(seed), path)
    status = {"state": "failed", "reason": "step 300: loss nan", "last_step": 300}
    (run / "status.json").write_text(json.dumps(status), encoding="utf-8")
    return run


def _break_contract(seed: int, path: Path) -> Path:
    run = write_run(healthy_scenario(seed), path)
    verdict = {"check": "carry", "status": "broken", "text": "cells after the first start from zero"}
    event = {"event": "contract", "global_step": 0, "verdicts": [verdict]}
    with (run / "events.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(event) + "\n")
    return run


_ONE_POOL: dict[str, Any] = {"num_sources": 1, "world_size": 1, "batching_mode": "per_stream"}
_BUSY: dict[str, Any] = {**_ONE_POOL, "micro_batches": 4, "log_interval": 2}

_MADE: dict[tuple[str, str, int, int], Callable[[int, Path], Path]] = {
    # (rule, what, onset, within): make
    ("false_evictions_lru", "capacity of half the groups in flight", 0, 20): _scenario(
        **_BUSY, num_streams_mixed=4, documents=32, capacity=8
    ),
    ("false_evictions_stale", "stale threshold of 3 steps", 0, 20): _scenario(
        **{**_BUSY, "micro_batches": 2},
        num_streams_mixed=6,
        documents=32,
        wipe_mode="periodic_stale",
        stale_threshold=3,
    ),
    ("cold_starts", "full wipe every 50 steps", 50, 10): _scenario(wipe_mode="full", wipe_every=50),
    ("refused_rows", "states that are NaN in one step", ONSET, 5): _scenario(on_states=_spoil_states),
    ("context_unused", "a gain of carrying that ends at 512 tokens", 0, 100): _rows(_by_depth(0.05, 0.06, 0.0, 0.0)),
    ("loss_rises_with_depth", "a gain of carrying below 0 from 512 tokens on", 0, 100): _rows(
        _by_depth(0.05, 0.06, -0.05)
    ),
    ("model_contract", "a model that drops its state", 0, 5): _break_contract,
    ("stuck_reader", "a reader that is never picked", ONSET, 30): _scenario(
        **_BUSY, num_streams_mixed=4, documents=48, streams=12, on_dataset=_stick
    ),
    ("uneven_slices", "batches of 1 and 64", 0, 40): _scenario(
        **{**_BUSY, "micro_batches": 2},
        num_streams_mixed=4,
        documents=48,
        streams=2,
        batch_size_by_modality={"a": 1, "b": 64},
        capacity=512,
    ),
    ("starved_modality", "no more streams of one modality", EARLY, 127): _scenario(
        **_BUSY, steps=150, num_streams_mixed=4, documents=4, on_dataset=_starve
    ),
    ("exhaust_churn", "slices of 1 or 2 picks", 0, 80): _scenario(
        **_ONE_POOL, micro_batches=2, documents=1, max_group_cells=2
    ),
    ("low_fill", "rows of which 20 to 95 % hold a token", 0, 50): _rows(_empty),
    ("shares", "a source that ends early", 0, 350): _scenario(
        **_BUSY | {"num_sources": 2, "micro_batches": 2},
        steps=500,
        documents=48,
        repeat=False,
        batch_size_by_modality={"b": 16},
        capacity=256,
        num_streams_mixed=4,
    ),
    ("repeated_data", "ranks that all read the same batches", 0, 20): _scenario(
        world_size=2, micro_batches=4, has_same_data=True
    ),
    ("repeated_data", "one micro-batch a rank, the same on all of them", 0, 20): _scenario(
        world_size=2, micro_batches=1, has_same_data=True
    ),
    ("batch_size", "a batch of 3 % of the noise scale", 0, 200): _scenario(
        noise_scale=500.0, world_size=1, micro_batches=4
    ),
    ("batch_size", "a batch of 40 times the noise scale", 0, 60): _scenario(
        noise_scale=0.4, world_size=1, micro_batches=4
    ),
    ("non_finite", "a NaN loss", ONSET, 5): _rows(_nan),
    ("loss_spikes", "one to three losses that give back what was learnt", ONSET, 5): _rows(_spike, log_interval=2),
    ("loss_spikes", "a loss that rises to several times the first", 0, 25): _rows(_diverge),
    ("data_bound", "waits of half to one and a half steps of a second or more", ONSET, 40): _rows(
        _wait_for_data, step_sec=(1.0, 2.0)
    ),
    ("straggling_rank", "a rank that takes 1.6 to 2 times as long, steps of a second or more", 0, 60): _rows(
        _straggle, world_size=2, step_sec=(1.0, 2.0)
    ),
    ("restarts", "three restarts from one step, or 30 of 130 steps lost", ONSET, 5): _restart_often,
    ("ending", "a run that failed", 0, 5): _fail,
}
FAULTS = [Fault(rule, what, make, at, steps) for (rule, what, at, steps), make in _MADE.items()]
