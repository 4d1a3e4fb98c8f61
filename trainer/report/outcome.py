"""What came of a run, and how two runs differ in config and in numbers. Pure: from what was read to plain rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainer.metrics.catalog.lookup import UnknownMetric, lookup
from trainer.runs.load import Run

# "At the end" is the last tenth of a run's logged rows, and never more of them than this: of a run with few rows, a
# fixed number of them would reach back to its beginning.
_MOST_ROWS: Final = 20
# Counters, schedules and what is an average or an extreme of all steps already: only their last value means something.
_NOT_AVERAGED: Final = ("lr", "tokens_seen", "gpu/peak_gb", "gpu/mem_utilization")
_NOT_AVERAGED_PREFIXES: Final = ("smoothed/", "blend/")
# They name the run; that they differ says nothing.
_NAMES_OF_THE_RUN: Final = ("run.name", "run.dir", "checkpoint.resume")
_RECORDED: Final = ("python", "platform", "packages", "world_size", "cpu_count", "devices")


@dataclass(frozen=True)
class Fact:
    """One number (or word) about how a run went; `value` is None where the run does not have it."""

    label: str
    value: float | str | None
    unit: str = ""
    precision: int = 4
    note: str = ""


@dataclass(frozen=True)
class KeyMean:
    """Mean of a key over the last rows of two runs (None: it has no such key), and how far the values scatter.

    `is_last`: the key is one that is not averaged; `means` are its last values.
    """

    key: str
    unit: str
    means: tuple[float | None, float | None]
    deviations: tuple[float | None, float | None]
    is_last: bool = False

    @property
    def difference(self) -> float | None:
        """Second less first."""
        first, second = self.means
        return None if first is None or second is None else second - first

    @property
    def relative(self) -> float | None:
        """The difference as a part of the first; None where that is 0 or unknown."""
        difference, first = self.difference, self.means[0]
        return None if difference is None or not first else difference / abs(first)


def _finite(run: Run, key: str) -> tuple[list[int], list[float]]:
    steps, values = run.column(key)
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if np.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _total(run: Run, *keys: str) -> float | None:
    found = [sum(values) for _, values in (_finite(run, key) for key in keys) if values]
    return sum(found) if found else None


@dataclass(frozen=True)
class End:
    """What "at the end" covers: the last `rows` logged training rows, of steps `first` to `last` (all 0: there are none)."""

    rows: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.rows <= 1:
            return f"the last logged row, step {self.last:,}" if self.rows else "no logged row"
        return f"the last {self.rows} logged rows, steps {self.first:,} to {self.last:,}"


def end_of(run: Run, window: int | None = None) -> End:
    """The end of a run: its last `window` logged rows, or as many as there are; None: the last tenth, 20 rows at most."""
    steps = run.steps
    if not len(steps):
        return End(0, 0, 0)
    wanted = window if window is not None else min(_MOST_ROWS, len(steps) // 10)
    rows = min(max(wanted, 1), len(steps))
    return End(rows, steps[-rows], steps[-1])


def _final_loss(run: Run, window: int | None) -> Fact:
    """The mean loss at the end, and of which steps it is; where none of them is finite, the last finite loss."""
    end = end_of(run, window)
    steps, values = _finite(run, "loss")
    if not values:
        return Fact("Final loss", None, "nats/token")
    inside = [value for step, value in zip(steps, values, strict=True) if step >= end.first]
    if len(inside) > 1:
        note = f"mean of {len(inside)} rows, steps {end.first:,} to {end.last:,}"
        return Fact("Final loss", statistics.fmean(inside), "nats/token", note=note)
    at = f"step {steps[-1]:,}"
    return Fact("Final loss", values[-1], "nats/token", note=at if steps[-1] == end.last else f"last finite one, {at}")


def _best(run: Run, key: str) -> tuple[float | None, str]:
    steps, values = _finite(run, key)
    if not values:
        return None, ""
    place = int(np.argmin(values))
    return values[place], f"step {steps[place]:,}"


def make_outcome(run: Run, *, window: int | None = None) -> list[Fact]:
    """How the run went: always the same labels in the same order. `window`: see `end_of`.

    The best loss is that of the smoothed curve where there is one: the least of many noisy values is luck.
    """
    state = str(run.status.get("state", "")) or None
    _, held_out = _finite(run, "eval_loss")
    is_smoothed = bool(len(run.column("smoothed/loss")[0]))
    best, best_at = _best(run, "smoothed/loss" if is_smoothed else "loss")
    best_held_out, best_held_out_at = _best(run, "eval_loss")
    _, speeds = _finite(run, "tokens_per_sec")
    _, tokens = _finite(run, "tokens_seen")
    known_at, noise_scale = _finite(run, "gns/b_simple")
    steps = run.steps
    return [
        Fact("State", state, note=str(run.status.get("reason", ""))),
        Fact("Steps", float(steps[-1]) if len(steps) else None, precision=0, note=f"{len(steps):,} logged"),
        Fact("Tokens seen", max(tokens) if tokens else None, "tokens", 0),
        _final_loss(run, window),
        Fact("Best loss", best, "nats/token", note=f"of the smoothed loss, {best_at}" if is_smoothed else best_at),
        Fact("Held-out loss", held_out[-1] if held_out else None, "nats/token", note="last evaluation"),
        Fact("Best held-out loss", best_held_out, "nats/token", note=best_held_out_at),
        Fact("Speed", statistics.median(speeds) if speeds else None, "tokens/s", 0, note="median of logged steps"),
        Fact(
            "Noise scale",
            noise_scale[-1] if noise_scale else None,
            "sequences",
            1,
            note=f"B_simple, last known at step {known_at[-1]:,}" if known_at else "",
        ),
        Fact("Cold starts", _total(run, "ledger/cold_starts"), "cells", 0),
        Fact("False evictions", _total(run, "ledger/false_evictions/lru", "ledger/false_evictions/stale"), "groups", 0),
        Fact("Rejected steps", _total(run, "non_finite_steps"), "steps", 0),
        Fact("Restarts", float(len(run.restarts)), "", 0),
    ]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested tables. Tables in a list go by their `name` where they have one, else by their number."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(flatten(value, f"{name}."))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                found.update(flatten(item, f"{name}.{item.get('name', number)}."))
        else:
            found[name] = value
    return found


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) where values differ; None where a run does not have the key.

    Keys of the recorded environment (versions, ranks, devices) carry `env.` in front. Names of the runs are left out.
    """
    flat = []
    for run in runs:
        recorded = {"env": {key: value for key, value in run.environment.items() if key in _RECORDED}}
        flat.append({**flatten(run.config), **flatten(recorded)})
    keys = dict.fromkeys(key for one in flat for key in one if key not in _NAMES_OF_THE_RUN)
    rows = [(key, [one.get(key) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _is_averaged(key: str) -> bool:
    return key not in _NOT_AVERAGED and not key.startswith(_NOT_AVERAGED_PREFIXES)


def _last_values(run: Run, key: str, end: End) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the steps of the last rows.

    Of a key that none of them has, and of one that is not averaged, its last value.
    """
    steps, values = _finite(run, key)
    if not values:
        return None, None
    if not _is_averaged(key):
        return values[-1], None
    last = [value for step, value in zip(steps, values, strict=True) if step >= end.first] or values[-1:]
    return statistics.fmean(last), statistics.stdev(last) if len(last) > 1 else None


def key_means(first: Run, second: Run, *, window: int | None = None) -> list[KeyMean]:
    """Every key of either run, averaged over the steps of the run's end (`end_of`), in the order of appearance.

    Counters, schedules and running averages are not averaged again: of them the last value stands.
    An evaluation in these steps is averaged like any other value; without one, the last evaluation stands.
    """
    rows = []
    ends = [(run, end_of(run, window)) for run in (first, second)]
    for key in _union(first.keys, second.keys):
        (mean_a, deviation_a), (mean_b, deviation_b) = (_last_values(run, key, end) for run, end in ends)
        try:
            unit = lookup(key).unit
        except UnknownMetric:
            unit = ""
        rows.append(KeyMean(key, unit, (mean_a, mean_b), (deviation_a, deviation_b), not _is_averaged(key)))
    return rows


def _union(*lists: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(item for one in lists for item in one))
