"""What came of a run, and how two runs differ in config and in numbers. Pure: from what was read to plain rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainer.metrics.catalog import UnknownMetric, lookup
from trainer.runs.load import Run

# Logged rows that "at the end" means; fewer where the run has fewer.
DEFAULT_WINDOW: Final = 20
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
    """Mean of a key over the last rows of two runs (None: it has no such key), and how far the values scatter."""

    key: str
    unit: str
    means: tuple[float | None, float | None]
    deviations: tuple[float | None, float | None]

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


def _last_mean(run: Run, key: str, window: int) -> float | None:
    _, values = _finite(run, key)
    return statistics.fmean(values[-window:]) if values else None


def _best(run: Run, key: str) -> tuple[float | None, str]:
    steps, values = _finite(run, key)
    if not values:
        return None, ""
    place = int(np.argmin(values))
    return values[place], f"step {steps[place]:,}"


def make_outcome(run: Run, *, window: int = DEFAULT_WINDOW) -> list[Fact]:
    """How the run went: always the same labels in the same order.

    The best loss is that of the smoothed curve where there is one: the least of many noisy values is luck.
    """
    state = str(run.status.get("state", "")) or None
    _, held_out = _finite(run, "eval_loss")
    best, best_at = _best(run, "smoothed/loss" if len(run.column("smoothed/loss")[0]) else "loss")
    best_held_out, best_held_out_at = _best(run, "eval_loss")
    _, speeds = _finite(run, "tokens_per_sec")
    _, tokens = _finite(run, "tokens_seen")
    known_at, noise_scale = _finite(run, "gns/b_simple")
    steps = run.steps
    return [
        Fact("State", state, note=str(run.status.get("reason", ""))),
        Fact("Steps", float(steps[-1]) if len(steps) else None, precision=0, note=f"{len(steps):,} logged"),
        Fact("Tokens seen", max(tokens) if tokens else None, "tokens", 0),
        Fact("Final loss", _last_mean(run, "loss", window), "nats/token", note=f"mean of the last {window} logged"),
        Fact("Best loss", best, "nats/token", note=f"smoothed, {best_at}" if best_at else ""),
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


def _last_values(run: Run, key: str, window: int) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the steps of the last rows; of a key that none of them has, its last value."""
    steps, values = _finite(run, key)
    if not values:
        return None, None
    from_step = run.steps[-window:][0] if len(run.steps) else 0
    last = [value for step, value in zip(steps, values, strict=True) if step >= from_step] or values[-1:]
    return statistics.fmean(last), statistics.stdev(last) if len(last) > 1 else None


def key_means(first: Run, second: Run, *, window: int = DEFAULT_WINDOW) -> list[KeyMean]:
    """Every key of either run, averaged over the steps of its last `window` training rows, in the order of appearance.

    An evaluation in these steps is averaged like any other value; without one, the last evaluation stands.
    """
    rows = []
    for key in _union(first.keys, second.keys):
        (mean_a, deviation_a), (mean_b, deviation_b) = (_last_values(run, key, window) for run in (first, second))
        try:
            unit = lookup(key).unit
        except UnknownMetric:
            unit = ""
        rows.append(KeyMean(key, unit, (mean_a, mean_b), (deviation_a, deviation_b)))
    return rows


def _union(*lists: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(item for one in lists for item in one))
