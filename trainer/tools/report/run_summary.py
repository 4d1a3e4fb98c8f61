"""The results of a run, and how runs differ in settings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

from trainer.config.load import recorded_settings
from trainer.metrics.catalog import ERRORS_SHOWN
from trainer.tools.diagnostics.state import FALSE_EVICTIONS
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import noise_scale_of
from trainer.wording import number_text

# The end of a run is its last tenth, but at most so many rows, or it would be all of a short run.
_MOST_ROWS, _MOST_TEXT = 20, 4_000


@dataclass(frozen=True)
class SummaryRow:
    """One result of a run."""

    label: str
    value: float | str | None  # None if the run does not have it
    unit: str = ""
    note: str = ""  # the rows that it was made of, or why there is no value, in words

    @property
    def text(self) -> str:
        if isinstance(self.value, str):
            return self.value
        return "–" if self.value is None else number_text(self.value, digits=5)


def rows_text(steps: Sequence[int]) -> str:
    """Some rows by their steps: `12 rows, steps 10 to 120`."""
    if not steps:
        return "no row"
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"{len(steps):,} rows, steps {steps[0]:,} to {steps[-1]:,}"


def _finite(run: RunRecord, key: str) -> dict[int, float]:
    """The finite values of a key by step."""
    return {step: value for step, value in zip(*run.column(key), strict=True) if math.isfinite(value)}


def _reduced(run: RunRecord, how: Callable[[list[float]], float], *keys: str) -> float | None:
    """One number of the finite values of keys; None without any."""
    values = [value for key in keys for value in _finite(run, key).values()]
    if not values:
        return None
    return how(values)


_last = itemgetter(-1)


def summarize(run: RunRecord) -> list[SummaryRow]:
    """The results of a run, always the same labels in the same order."""
    return [
        SummaryRow("State", run.status.get("state"), note=run.status.get("reason") or ""),
        SummaryRow("Steps", float(max(run.steps, default=0)) or None, note=rows_text(run.steps)),
        _time(run),
        SummaryRow("Tokens seen", _reduced(run, _last, "tokens_seen"), "tokens"),
        SummaryRow("Data read", _reduced(run, _last, "data/epochs_most"), "epochs", "at most"),
        SummaryRow("Parameters", float(run.environment.get("parameters") or 0) or None),
        SummaryRow("Fill", _reduced(run, statistics.fmean, "data/fill"), "of full rows"),
        SummaryRow("Speed", _reduced(run, statistics.median, "tokens_per_sec"), "tokens/s"),
        SummaryRow("MFU", _reduced(run, statistics.median, "mfu"), "of the peak"),
        SummaryRow("Peak memory", _reduced(run, _last, "gpu/peak_gb"), "GB"),
        _held_out(run),
        SummaryRow("Held out", _reduced(run, _last, "eval_bits_per_byte"), "bits/byte"),
        _final_loss(run),
        _noise_scale(run),
        SummaryRow("Cold starts", _reduced(run, math.fsum, "ledger/cold_starts"), "cells"),
        SummaryRow("False evictions", _reduced(run, math.fsum, *FALSE_EVICTIONS.values()), "groups"),
        SummaryRow("Rejected steps", _reduced(run, math.fsum, "non_finite_steps"), "steps"),
        SummaryRow("Restarts", float(len(run.restarts))),
    ]


def _time(run: RunRecord) -> SummaryRow:
    """Time of all steps: each row has the mean of the steps since the row before."""
    times, seconds, label = _finite(run, "step_time_sec"), 0.0, "Time of all steps"
    if not times:
        return SummaryRow(label, None, "s")
    # A run that begins as a branch of another one counts its own steps alone.
    begins = [each.global_step for each in run.restarts if each.global_step < min(times)]
    before = max(begins, default=0)
    for step, each in times.items():
        seconds, before = seconds + each * (step - before), step
    note = f"{timedelta(seconds=round(seconds))} without evaluations and checkpoints"
    return SummaryRow(label, seconds, "s", note)


def _held_out(run: RunRecord) -> SummaryRow:
    """The last held-out loss, with its error, and the lowest one."""
    evals, errors = _finite(run, "eval_loss"), _finite(run, "eval_loss_se")
    if not evals:
        return SummaryRow("Held-out loss", None, "nats/token")
    last, best = max(evals), min(evals, key=evals.__getitem__)
    notes = [f"step {last:,}", f"best {number_text(evals[best])} at step {best:,}"]
    if last in errors:
        notes.insert(0, f"+- {number_text(ERRORS_SHOWN * errors[last])} (95 %)")
    return SummaryRow("Held-out loss", evals[last], "nats/token", ", ".join(notes))


def _final_loss(run: RunRecord) -> SummaryRow:
    """The mean loss of the last rows, a tenth of them, that have a finite one."""
    losses, label, unit = _finite(run, "loss"), "Final loss", "nats/token"
    steps = sorted(losses)[-max(min(_MOST_ROWS, len(run.steps) // 10), 1) :]
    if not steps:
        return SummaryRow(label, None, unit)
    mean = statistics.fmean(map(losses.__getitem__, steps))
    return SummaryRow(label, mean, unit, f"mean of {rows_text(steps)}")


def _noise_scale(run: RunRecord) -> SummaryRow:
    """The last row's estimate with its bounds, in the words of diagnosis."""
    scale, label, unit = noise_scale_of(run), "Noise scale", "sequences"
    if scale is None or not scale.is_known:
        return SummaryRow(label, None, unit)
    return SummaryRow(label, scale.number, unit, scale.where)


# ---- Several runs


def summaries(runs: Sequence[RunRecord]) -> list[tuple[SummaryRow, ...]]:
    """The results that any of the runs has, those of all side by side."""
    rows = zip(*map(summarize, runs), strict=True)
    return [results for results in rows if any(each.value is not None or each.note for each in results)]


def value_text(value: Any) -> str:
    """A config value as JSON."""
    if value is None:
        return "–"
    return json.dumps(value, ensure_ascii=False, default=str)[:_MOST_TEXT]


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) for settings that differ; None where a run lacks one.

    Keys are those of `recorded_settings`; values are those of the last launch.
    """
    flat = [recorded_settings(run.config, run.environment) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
