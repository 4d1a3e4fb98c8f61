"""The results of a run, and how two runs differ in settings and metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from trainer.config.compare import flatten
from trainer.metrics.catalog.lookup import is_known, keys_under, lookup
from trainer.runs.load import RunRecord
from trainer.runs.noise_scale import noise_scale_of
from trainer.wording import number_text

# The end of a run is its last tenth, but at most this many rows. A fixed number would cover all of a short run.
_MOST_ROWS: Final = 20
# Counters, schedules, and averages or extremes over all steps: only their last value is meaningful.
_NOT_AVERAGED: Final = ("lr", "tokens_seen", "gpu/peak_gb", "gpu/mem_utilization")
_NOT_AVERAGED_PREFIXES: Final = ("smoothed/", "blend/")
# These name the run, so they always differ.
_NAMES_OF_THE_RUN: Final = ("run.name", "run.dir", "checkpoint.resume")
_RECORDED: Final = ("python", "platform", "packages", "world_size", "cpu_count", "devices")


@dataclass(frozen=True)
class SummaryRow:
    """One result of a run; `value` is None if the run does not have it."""

    label: str
    value: float | str | None
    unit: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """The value, or a dash."""
        if self.value is None:
            return "–"
        return self.value if isinstance(self.value, str) else number_text(self.value, digits=5)


@dataclass(frozen=True)
class KeyMean:
    """Means and standard deviations of a key at the end of two runs; None where a run does not have it.

    With `is_last`, the key is not averaged, and `means` are its last values.
    """

    key: str
    unit: str
    means: tuple[float | None, float | None]
    deviations: tuple[float | None, float | None]
    is_last: bool = False

    @property
    def difference(self) -> float | None:
        """Second minus first."""
        first, second = self.means
        return None if first is None or second is None else second - first

    @property
    def relative(self) -> float | None:
        """The difference relative to the first; None if the first is 0 or unknown."""
        difference, first = self.difference, self.means[0]
        return None if difference is None or not first else difference / abs(first)


@dataclass(frozen=True)
class End:
    """The end of a run: its last `rows` logged training rows, steps `first` to `last`; all 0 without rows."""

    rows: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.rows <= 1:
            return f"the last logged row, step {self.last:,}" if self.rows else "no logged row"
        return f"the last {self.rows} logged rows, steps {self.first:,} to {self.last:,}"


def end_of(run: RunRecord, window: int | None = None) -> End:
    """The last `window` rows, or as many as there are; None: the last tenth of the rows, but at most 20."""
    steps = run.steps
    if not steps:
        return End(0, 0, 0)
    wanted = window if window is not None else min(_MOST_ROWS, len(steps) // 10)
    rows = min(max(wanted, 1), len(steps))
    return End(rows, steps[-rows], steps[-1])


def _finite(run: RunRecord, key: str) -> dict[int, float]:
    """The finite values of a key by step."""
    return {step: value for step, value in zip(*run.column(key), strict=True) if isfinite(value)}


def _last(values: dict[int, float]) -> float | None:
    return next(reversed(values.values()), None)


def _total(run: RunRecord, *keys: str) -> float | None:
    columns = [column.values() for column in (_finite(run, key) for key in keys) if column]
    return sum(map(sum, columns)) if columns else None


def _final_loss(run: RunRecord, window: int | None) -> SummaryRow:
    """The mean loss at the end, with its steps; if none of these losses is finite, the last finite one."""
    end, losses = end_of(run, window), _finite(run, "loss")
    if not losses:
        return SummaryRow("Final loss", None, "nats/token")
    inside = [value for step, value in losses.items() if step >= end.first]
    if len(inside) > 1:
        note = f"mean of {len(inside)} rows, steps {end.first:,} to {end.last:,}"
        return SummaryRow("Final loss", statistics.fmean(inside), "nats/token", note)
    last = max(losses)
    note = f"step {last:,}" if last == end.last else f"last finite value, step {last:,}"
    return SummaryRow("Final loss", losses[last], "nats/token", note)


def _noise_scale(run: RunRecord) -> SummaryRow:
    """The last row's estimate with its bounds; without an upper one, its lower bound."""
    scale = noise_scale_of(run)
    if scale is None:
        return SummaryRow("Noise scale", None, "sequences")
    if scale.value is None or scale.high is None:
        return SummaryRow("Noise scale", f"at least {scale.low:.4g}", "sequences", scale.where)
    between = f", between {scale.low:.4g} and {scale.high:.4g}"
    return SummaryRow("Noise scale", scale.value, "sequences", f"{scale.where}{between}")


def _best_loss(label: str, losses: Mapping[int, float], prefix: str = "") -> SummaryRow:
    if not losses:
        return SummaryRow(label, None, "nats/token")
    step = min(losses, key=losses.__getitem__)
    return SummaryRow(label, losses[step], "nats/token", f"{prefix}step {step:,}")


def summarize(run: RunRecord, *, window: int | None = None) -> list[SummaryRow]:
    """The results of a run, always the same labels in the same order. `window`: see `end_of`.

    The best loss is that of the smoothed curve if it is logged: the minimum of many noisy values is luck.
    """
    state = str(run.status.get("state", "")) or None
    held_out, smoothed = _finite(run, "eval_loss"), _finite(run, "smoothed/loss")
    speeds = _finite(run, "tokens_per_sec").values()
    return [
        SummaryRow("State", state, note=str(run.status.get("reason", ""))),
        SummaryRow("Steps", float(run.steps[-1]) if run.steps else None, note=f"{len(run.steps):,} logged"),
        SummaryRow("Tokens seen", max(_finite(run, "tokens_seen").values(), default=None), "tokens"),
        _final_loss(run, window),
        _best_loss("Best loss", smoothed, "smoothed, ") if smoothed else _best_loss("Best loss", _finite(run, "loss")),
        SummaryRow("Held-out loss", _last(held_out), "nats/token", "last evaluation"),
        _best_loss("Best held-out loss", held_out),
        SummaryRow("Speed", statistics.median(speeds) if speeds else None, "tokens/s", "median of logged steps"),
        _noise_scale(run),
        SummaryRow("Cold starts", _total(run, "ledger/cold_starts"), "cells"),
        SummaryRow("False evictions", _total(run, *keys_under("ledger/false_evictions/")), "groups"),
        SummaryRow("Rejected steps", _total(run, "non_finite_steps"), "steps"),
        SummaryRow("Restarts", float(len(run.restarts))),
    ]


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) for settings that differ; None where a run does not have the key.

    Keys of the recorded environment (versions, ranks, devices) are prefixed with `env.`. The names of the run are left out.
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


def _end_mean(run: RunRecord, key: str, end: End) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the end of a run; the last value if the key is not averaged or not logged there."""
    column = _finite(run, key)
    values = [value for step, value in column.items() if step >= end.first] if _is_averaged(key) else []
    if not values:
        return _last(column), None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def key_means(first: RunRecord, second: RunRecord, *, window: int | None = None) -> list[KeyMean]:
    """Every key of either run, averaged over the end of each run (`end_of`), in order of appearance.

    Evaluations within these steps are averaged too. For counters, schedules and running averages, and for keys that are not
    logged within these steps, the last value is given.
    """
    ends = [(run, end_of(run, window)) for run in (first, second)]
    rows = []
    for key in dict.fromkeys([*first.keys, *second.keys]):
        (mean_a, deviation_a), (mean_b, deviation_b) = (_end_mean(run, key, end) for run, end in ends)
        unit = lookup(key).unit if is_known(key) else ""
        rows.append(KeyMean(key, unit, (mean_a, mean_b), (deviation_a, deviation_b), not _is_averaged(key)))
    return rows
