"""The results of a run, and how runs differ in settings and metrics."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from trainer.config.load import recorded_settings
from trainer.metrics.catalog.lookup import ERRORS_SHOWN, is_known, keys_under, lookup
from trainer.metrics.catalog.rows_data import EPOCHS
from trainer.tools.diagnostics.rule import sources
from trainer.tools.runs.load import RunRecord, settings_by_step
from trainer.tools.runs.noise_scale import noise_scale_of, why_unknown
from trainer.wording import counted, few, number_text

# The end of a run is its last tenth, but at most so many rows, or it would be all of a short run.
_MOST_ROWS, _MOST_TEXT = 20, 4_000
# Counters, schedules, and averages or extremes over all steps: only their last value is meaningful.
_NOT_AVERAGED: Final = ("lr", "tokens_seen", "gpu/peak_gb", "gpu/mem_utilization")
_NOT_AVERAGED_PREFIXES: Final = ("smoothed/", "blend/", EPOCHS)
# Settings that decide which documents are held out. A weight only says how often a source is drawn.
_HELD_OUT_SETTINGS: Final = (*("eval.", "data.source", "data.tokenizer", "data.seq_len", "data.max_group_cells"),)
_SAME_LOSS: Final = ("objective.token_types", "objective.chunk_tokens")


@dataclass(frozen=True)
class SummaryRow:
    """One result of a run."""

    label: str
    value: float | str | None  # None if the run does not have it
    unit: str = ""
    note: str = ""  # the rows that it was made of, or why there is no value, in words
    digits: int = 5  # significant ones of `text`

    @property
    def text(self) -> str:
        if self.value is None:
            return "–"
        if isinstance(self.value, str):
            return self.value
        return number_text(self.value, digits=self.digits)

    @property
    def heading(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class KeyMean:
    """Means and standard deviations of a key at the end of two runs; None where a run lacks it."""

    key: str
    unit: str
    means: tuple[float | None, float | None]
    standard_deviations: tuple[float | None, float | None]
    is_last: bool  # the key is not averaged, and `means` are its last values
    difference: float | None  # second minus first


@dataclass(frozen=True)
class End:
    """The end of a run: its last logged training rows, steps `first` to `last`, or zeros."""

    rows: int
    first: int
    last: int

    def __str__(self) -> str:
        if not self.rows:
            return "no logged row"
        if self.rows == 1:
            return f"the last logged row, step {self.last:,}"
        return f"the last {self.rows} logged rows, steps {self.first:,} to {self.last:,}"


def end_of(run: RunRecord, window: int | None = None) -> End:
    """The last `window` rows; None: the last tenth of the rows, but at most 20."""
    steps = run.steps
    if not steps:
        return End(0, 0, 0)
    if window is None:
        window = min(_MOST_ROWS, len(steps) // 10)
    rows = min(max(window, 1), len(steps))
    return End(rows, steps[-rows], steps[-1])


def _finite(run: RunRecord, key: str) -> dict[int, float]:
    """The finite values of a key by step."""
    return {step: value for step, value in zip(*run.column(key), strict=True) if math.isfinite(value)}


def rows_text(steps: Sequence[int]) -> str:
    """The rows that a figure was made of: `12 rows, steps 10 to 120`."""
    if not steps:
        return "no row"
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"{len(steps):,} rows, steps {steps[0]:,} to {steps[-1]:,}"


def _last_row(label: str, run: RunRecord, key: str, unit: str) -> SummaryRow:
    """The value of the last step."""
    values = _finite(run, key)
    if not values:
        return SummaryRow(label, None, unit)
    step = max(values)
    return SummaryRow(label, values[step], unit, f"step {step:,}")


def _total(label: str, run: RunRecord, keys: Sequence[str], unit: str) -> SummaryRow:
    columns = [_finite(run, key) for key in keys]
    steps = sorted(set[int]().union(*columns))
    if not steps:
        return SummaryRow(label, None, unit)
    total = sum(sum(column.values()) for column in columns)
    return SummaryRow(label, total, unit, f"total of {rows_text(steps)}")


def _middle(label: str, run: RunRecord, key: str, unit: str, of: str = "median") -> SummaryRow:
    """The median, or the mean, of a key's finite values."""
    values = _finite(run, key)
    if not values:
        return SummaryRow(label, None, unit)
    middle, rows = statistics.median(values.values()), rows_text(list(values))
    if of == "mean":
        middle = statistics.fmean(values.values())
    if len(values) > 1:
        rows = f"{of} of {rows}"
    return SummaryRow(label, middle, unit, rows, digits=4)


def _final_loss(run: RunRecord, window: int | None) -> SummaryRow:
    """The mean loss at the end; if none there is finite, the last finite one."""
    losses, label, unit = _finite(run, "loss"), "Final loss", "nats/token"
    if not losses:
        return SummaryRow(label, None, unit)
    end = end_of(run, window)
    steps = [step for step in losses if step >= end.first]
    if not steps:
        step = max(losses)
        return SummaryRow(label, losses[step], unit, f"last finite value, step {step:,}")
    mean = statistics.fmean(losses[step] for step in steps)
    return SummaryRow(label, mean, unit, f"mean of {rows_text(steps)}")


def _noise_scale(run: RunRecord) -> SummaryRow:
    """The last row's estimate with its bounds; without an upper one, its lower bound."""
    scale, label, unit = noise_scale_of(run), "Noise scale", "sequences"
    if scale is None or not scale.is_known:
        return SummaryRow(label, None, unit, why_unknown(run))
    if scale.value is None or scale.high is None:
        return SummaryRow(label, scale.number, unit, scale.where)
    between = f", between {number_text(scale.low)} and {number_text(scale.high)}"
    return SummaryRow(label, scale.value, unit, f"{scale.where}{between}", digits=4)


def _time(run: RunRecord) -> SummaryRow:
    """Time of all steps: each row has the mean of the steps since the row before."""
    times, seconds, label = _finite(run, "step_time_sec"), 0.0, "Time of all steps"
    if not times:
        return SummaryRow(label, None, "s")
    # A run that begins as a branch of another one counts its own steps alone.
    before = max((each.global_step for each in run.restarts if each.global_step < min(times)), default=0)
    for step, each in times.items():
        seconds, before = seconds + each * (step - before), step
    note = f"{timedelta(seconds=round(seconds))} without evaluations and checkpoints"
    return SummaryRow(label, seconds, "s", note, digits=3)


def _epochs(run: RunRecord) -> SummaryRow:
    """How often the data were read: the source that was read most, and in the note the others."""
    columns = {key.removeprefix(EPOCHS): _finite(run, key) for key in run.keys if key.startswith(EPOCHS)}
    # A count that became unknown during the run is no total.
    end = max(_finite(run, "tokens_seen"), default=0)
    last = {name: column[end] for name, column in columns.items() if end in column}
    first, *others = sorted(last, key=last.__getitem__, reverse=True) or [""]
    note = ""
    if others:
        rest = [f"{name} {number_text(last[name], digits=3)}" for name in others]
        note = f"source {first}; {few(rest)}"
    return SummaryRow("Data read", last.get(first), "epochs", note, digits=3)


def ran(run: RunRecord) -> list[SummaryRow]:
    """The model, the device and the data of a run, as far as they are recorded."""
    model, name, sizes = run.setting("model"), "", ""
    if isinstance(model, Mapping):
        name = str(model.get("target") or model.get("family") or "rglru")  # the default, as `families.DEFAULT`
        sizes = f"dim {model.get('dim')}, {model.get('num_layers')} layers"
        if model.get("num_layers") == 1:
            sizes = sizes.removesuffix("s")
    parts = [run.setting("train.precision")]
    if run.world_size:
        parts.insert(0, counted(run.world_size, "rank"))
    if run.world_size != 1:
        parts.append(run.setting("distributed.strategy"))
    rows = [
        SummaryRow("Model", name, note=sizes),
        SummaryRow("Device", _device(run), note=", ".join(map(str, filter(None, parts)))),
        SummaryRow("Data", few([str(table.get("name")) for table in sources(run)])),
    ]
    return [row for row in rows if row.value]


def _device(run: RunRecord) -> str:
    wanted, devices = run.setting("train.device"), run.environment.get("devices")
    if wanted is None or devices is None:
        return ""
    if wanted == "cpu" or not devices:
        return "cpu"
    return few(list(dict.fromkeys(devices)))


def summarize(run: RunRecord, *, window: int | None = None) -> list[SummaryRow]:
    """The results of a run, always the same labels in the same order. `window`: see `end_of`."""
    steps, ratio, batch, of_batch, redone = SummaryRow("Steps", None), None, None, "", ""
    if run.steps:
        steps = SummaryRow("Steps", float(run.steps[-1]), note=f"the last of {rows_text(run.steps)}")
    tokens = _last_row("Tokens seen", run, "tokens_seen", "tokens")
    parameters, full = (run.environment.get(key) for key in ("parameters", "tokens_per_step"))
    size = float(parameters or 0) or None
    if size and isinstance(tokens.value, float):
        ratio = tokens.value / size
    if steps.value and isinstance(tokens.value, float):
        batch, of_batch = tokens.value / run.steps[-1], "mean of all steps"
        if full and batch <= full:  # of the last launch: others may have had more ranks
            of_batch = f"of at most {full:,}, {of_batch}"
    if run.steps_redone:
        redone = f"{counted(run.steps_redone, 'step')} repeated"
    return [
        _state(run),
        steps,
        _time(run),
        tokens,
        _epochs(run),
        SummaryRow("Parameters", size),
        SummaryRow("Tokens per parameter", ratio),
        SummaryRow("Batch", batch, "tokens/step", of_batch, digits=4),
        _middle("Fill", run, "data/fill", "of full rows", "mean"),
        _middle("Speed", run, "tokens_per_sec", "tokens/s"),
        _middle("MFU", run, "mfu", "of the peak"),
        _last_row("Peak memory", run, "gpu/peak_gb", "GB"),
        *_held_out(run),
        _final_loss(run, window),
        _noise_scale(run),
        _total("Cold starts", run, ["ledger/cold_starts"], "cells"),
        _total("False evictions", run, keys_under("ledger/false_evictions/"), "groups"),
        _total("Rejected steps", run, ["non_finite_steps"], "steps"),
        SummaryRow("Restarts", float(len(run.restarts)), note=redone),
    ]


def _state(run: RunRecord) -> SummaryRow:
    """How the run stands, with the step and the reason."""
    state, step, reason = (run.status.get(key) for key in ("state", "last_step", "reason"))
    reached = f"step {step:,}" if isinstance(step, int) else ""
    note = ": ".join(filter(None, (reached, str(reason or ""))))
    return SummaryRow("State", str(state) if state else None, note=note)


def _held_out(run: RunRecord) -> list[SummaryRow]:
    """The last and the lowest held-out loss, with bits per byte and the error of the last."""
    evals, errors, bits = (_finite(run, f"eval_{name}") for name in ("loss", "loss_se", "bits_per_byte"))
    many = counted(len(evals), "evaluation")
    if errors:
        many += f", +- {number_text(ERRORS_SHOWN * list(errors.values())[-1])} (95 %)"
    last, best = max(evals, default=0), min(evals, key=evals.__getitem__, default=0)
    rows = []
    for label, which, step in (("Held-out loss", "last", last), ("Best held-out loss", "best", best)):
        note = ""
        if evals:
            note = f"{which} of {many}, step {step:,}"
            if step in bits:
                note = f"{number_text(bits[step])} bits/byte, {note}"
        rows.append(SummaryRow(label, evals.get(step), "nats/token", note))
    return rows


def summaries(runs: Sequence[RunRecord], window: int | None = None) -> list[tuple[SummaryRow, ...]]:
    """The results that any of the runs has, those of all side by side."""
    rows = zip(*(summarize(run, window=window) for run in runs), strict=True)
    return [results for results in rows if any(each.value is not None or each.note for each in results)]


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, labeled by their paths where names are not distinct; equal paths are numbered."""
    if len({run.name for run in runs}) == len(runs):
        return list(runs)
    seen, named = Counter[str](), []
    for run in runs:
        label = str(run.path)
        seen[label] += 1
        if seen[label] > 1:
            label += f" ({seen[label]})"
        named.append(replace(run, label=label))
    return named


def value_text(value: Any) -> str:
    """A config value as JSON; one that a resume changed: `0.01; 0.001 from step 31 on`."""
    if isinstance(value, Mapping) and value:
        first, *later = value.items()
        parts = [value_text(first[1]), *(f"{value_text(each)} from step {step:,} on" for step, each in later)]
        return "; ".join(parts)[:_MOST_TEXT]
    if value is None:
        return "–"
    return json.dumps(value, ensure_ascii=False, default=str)[:_MOST_TEXT]


def _strict(value: Any) -> Any:
    """A value as strict JSON has it, which has neither nan nor inf; by step if it is."""
    if isinstance(value, dict):
        return {step: _strict(each) for step, each in value.items()}
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) for settings that differ; None where a run lacks one.

    Keys are those of `recorded_settings`; a changed value is a mapping (`settings_by_step`).
    """
    flat = []
    for run in runs:
        found = recorded_settings(run.config, run.environment) | settings_by_step(run)
        flat.append({key: _strict(value) for key, value in found.items()})
    rows = []
    for key in dict.fromkeys(key for one in flat for key in one):
        values = [one.get(key) for one in flat]
        if any(value != values[0] for value in values):
            rows.append((key, values))
    return rows


def _end_mean(run: RunRecord, end: End, key: str, *, is_averaged: bool) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the end of a run; if not averaged there, the last value."""
    column = _finite(run, key)
    values = [value for step, value in column.items() if step >= end.first and is_averaged]
    if not values:
        return next(reversed(column.values()), None), None
    if len(values) == 1:
        return values[0], None
    return statistics.fmean(values), statistics.stdev(values)


def key_means(first: RunRecord, second: RunRecord, *, window: int | None = None) -> list[KeyMean]:
    """Every key of either run, averaged over its end (`end_of`), in order of appearance.

    Evaluations within these steps are averaged too. For counters, schedules and running averages,
    and for keys that are not logged within these steps, the last value is given.
    """
    ends = [(run, end_of(run, window)) for run in (first, second)]
    rows = []
    for key in dict.fromkeys([*first.keys, *second.keys]):
        is_averaged = key not in _NOT_AVERAGED and not key.startswith(_NOT_AVERAGED_PREFIXES)
        (mean_a, deviation_a), (mean_b, deviation_b) = (_end_mean(*end, key, is_averaged=is_averaged) for end in ends)
        difference = None
        if mean_a is not None and mean_b is not None:
            difference = mean_b - mean_a
        unit = lookup(key).unit if is_known(key) else ""
        means, deviations = (mean_a, mean_b), (deviation_a, deviation_b)
        rows.append(KeyMean(key, unit, means, deviations, not is_averaged, difference))
    return rows


def reservations(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Why results may not compare, in words: state, length, other data or other objectives."""
    states = [(run.name, run.status.get("state", "done")) for run in runs]
    unfinished = [f"{name} ({state})" for name, state in states if state != "done"]
    if unfinished:
        yield f"not done: {few(unfinished)}"
    ends = {run.name: run.steps[-1] for run in runs if run.steps}
    last = max(ends.values(), default=0)
    short = [f"{name} ({step:,})" for name, step in ends.items() if step < last]
    if short:
        yield f"not equally long: the longest ended at step {last:,}, earlier {few(short)}"
    keys = [key for key, _ in config_differences(runs) if key.startswith(_HELD_OUT_SETTINGS)]
    differing = [key for key in keys if not key.endswith(".weight")]
    if differing:
        yield f"held-out losses may be of different data: {few(differing)} differ"
    keys = [key for key, _ in config_differences(runs) if key.startswith("objective.")]
    differing = [key for key in keys if key not in _SAME_LOSS]
    if differing:
        yield f"losses are of different objectives: {few(differing)} differ"
