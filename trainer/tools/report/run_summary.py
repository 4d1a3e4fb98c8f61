"""The results of a run, how runs differ in settings and metrics, and runs that differ in their seed alone as one row."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any, Final

from trainer.config.load import recorded_settings
from trainer.metrics.catalog.lookup import ERRORS_SHOWN, is_known, keys_under, lookup
from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.runs.load import RunRecord, settings_by_step
from trainer.tools.runs.noise_scale import noise_scale_of, why_unknown
from trainer.wording import counted, few, number_text

# The end of a run is its last tenth, but at most this many rows. A fixed number would cover all of a short run.
_MOST_ROWS, _MOST_TEXT = 20, 4_000
# Counters, schedules, and averages or extremes over all steps: only their last value is meaningful.
_NOT_AVERAGED: Final = ("lr", "tokens_seen", "gpu/peak_gb", "gpu/mem_utilization")
_NOT_AVERAGED_PREFIXES: Final = ("smoothed/", "blend/")
SEED: Final = "run.seed"
ERRORS_WIDE: Final = 2.0
"""Standard errors of a difference below which it may well be chance."""
TOKEN_MARGIN: Final = 0.05  # steps differ in tokens, and so runs of equally many steps a little, by their seed
RANKED_BY: Final = ("Held-out loss", "Final loss")
_WORLD_SIZE: Final = "env.world_size"  # changes the batch; other recorded values should not change a result
_HELD_OUT_SETTINGS: Final = (
    "data files",
    "eval.",
    "data.source",
    "data.tokenizer",
    "data.seq_len",
    "data.max_group_cells",
)


@dataclass(frozen=True)
class SummaryRow:
    """One result of a run; `value` is None if the run does not have it.

    Attributes:
        note: the rows that it was made of, or why there is no value, in words.
        digits: significant digits of `text`.
    """

    label: str
    value: float | str | None
    unit: str = ""
    note: str = ""
    digits: int = 5

    @property
    def text(self) -> str:
        """The value, or a dash."""
        if self.value is None:
            return "–"
        return self.value if isinstance(self.value, str) else number_text(self.value, digits=self.digits)

    @property
    def heading(self) -> str:
        """The label with the unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class KeyMean:
    """Means and standard deviations of a key at the end of two runs; None where a run does not have it.

    Attributes:
        is_last: the key is not averaged, and `means` are its last values.
        difference: second minus first; `relative` to the first, if that is not 0.
    """

    key: str
    unit: str
    means: tuple[float | None, float | None]
    standard_deviations: tuple[float | None, float | None]
    is_last: bool
    difference: float | None
    relative: float | None


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
    return {step: value for step, value in zip(*run.column(key), strict=True) if math.isfinite(value)}


def rows_text(steps: Sequence[int]) -> str:
    """The rows that a figure was made of: `12 rows, steps 10 to 120`."""
    if not steps:
        return "no row"
    return f"{len(steps):,} rows, steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"


def _last_row(label: str, values: dict[int, float], unit: str, what: str = "", step: int | None = None) -> SummaryRow:
    """The value of the last step, or of `step`."""
    if not values:
        return SummaryRow(label, None, unit)
    step = max(values) if step is None else step
    return SummaryRow(label, values[step], unit, f"{what}step {step:,}")


def _total(label: str, run: RunRecord, keys: Sequence[str], unit: str) -> SummaryRow:
    columns = [_finite(run, key) for key in keys]
    steps = sorted(set[int]().union(*columns))
    total = sum(sum(column.values()) for column in columns)
    return SummaryRow(label, total, unit, f"total of {rows_text(steps)}") if steps else SummaryRow(label, None, unit)


def _middle(label: str, run: RunRecord, key: str, unit: str, of: str = "median", front: str = "") -> SummaryRow:
    """The median, or the mean, of a key's finite values."""
    if not (values := _finite(run, key)):
        return SummaryRow(label, None, unit)
    value = (statistics.fmean if of == "mean" else statistics.median)(values.values())
    return SummaryRow(label, value, unit, front + f"{of} of " * (len(values) > 1) + rows_text(list(values)), digits=4)


def _losses(run: RunRecord, window: int | None) -> list[SummaryRow]:
    """The mean loss at the end (if none there is finite, the last finite one), and the lowest mean of as many consecutive rows,
    which the final one is one of: the minimum of single rows is luck, and a running average lags."""
    losses = _finite(run, "loss")
    if not losses:
        return [SummaryRow(label, None, "nats/token") for label in ("Final loss", "Best loss")]
    steps, values = list(losses), list(losses.values())
    end = end_of(run, window)
    width = max(sum(step >= end.first for step in steps), 1)
    what = "mean of " if width > 1 else "" if steps[-1] == run.steps[-1] else "last finite value, "
    final = statistics.fmean(values[-width:]), what + rows_text(steps[-width:])
    sums = list(accumulate(values, initial=0.0))
    starts = range(len(values) - width + 1)
    lowest = min(starts, key=lambda start: sums[start + width] - sums[start])
    # The running sums are rounded: the final rows are compared exactly.
    mean, start = min((statistics.fmean(values[at : at + width]), at) for at in (lowest, starts[-1]))
    where = ("lowest mean of " if width > 1 else "lowest row, ") + rows_text(steps[start : start + width])
    return [
        SummaryRow("Final loss", final[0], "nats/token", final[1]),
        SummaryRow("Best loss", mean, "nats/token", where),
    ]


def _noise_scale(run: RunRecord) -> SummaryRow:
    """The last row's estimate with its bounds; without an upper one, its lower bound. The digits are the diagnosis'."""
    scale = noise_scale_of(run)
    if scale is None or not scale.is_known:
        return SummaryRow("Noise scale", None, "sequences", why_unknown(run))
    if scale.value is None or scale.high is None:
        return SummaryRow("Noise scale", scale.number, "sequences", scale.where)
    between = f", between {number_text(scale.low)} and {number_text(scale.high)}"
    return SummaryRow("Noise scale", scale.value, "sequences", f"{scale.where}{between}", digits=4)


def _time(run: RunRecord) -> SummaryRow:
    """Of all steps: each row has the mean time of the steps since the row before."""
    times, seconds = _finite(run, "step_time_sec"), 0.0
    before = max((each.global_step for each in run.restarts if each.global_step < min(times, default=0)), default=0)
    for step, each in times.items():
        seconds, before = seconds + each * (step - before), step
    note = f"{timedelta(seconds=round(seconds))} without evaluations and checkpoints" * bool(times)
    return SummaryRow("Time of all steps", seconds if times else None, "s", note, digits=3)


def ran(run: RunRecord) -> list[SummaryRow]:
    """What was trained, on what: the model, the device and the data, as far as they are recorded."""
    model, ranks, devices = run.setting("model"), run.world_size, run.environment.get("devices")
    name = sizes = device = ""
    if isinstance(model, Mapping):
        name = str(model.get("target") or model.get("family") or "rglru")  # the default, as `families.DEFAULT`
        sizes = f"dim {model.get('dim')}, {model.get('num_layers')} layers"
    if devices is not None and (wanted := run.setting("train.device")) is not None:
        device = few(list(dict.fromkeys(devices))) if devices and wanted != "cpu" else "cpu"
    how = [run.setting("train.precision"), run.setting("distributed.strategy") if ranks != 1 else None]
    how = [counted(ranks, "rank") if ranks else "", *how]
    sources = run.setting("data.source")
    tables = [each for each in sources if isinstance(each, Mapping)] if isinstance(sources, list) else []
    rows = ("Model", name, sizes), ("Device", device, ", ".join(map(str, filter(None, how))))
    found = [*rows, ("Data", few([str(each.get("name")) for each in tables]), "")]
    return [SummaryRow(label, value, note=note) for label, value, note in found if value]


def summarize(run: RunRecord, *, window: int | None = None) -> list[SummaryRow]:
    """The results of a run, always the same labels in the same order. `window`: see `end_of`."""
    state, step, reason = (run.status.get(key) for key in ("state", "last_step", "reason"))
    reached = [f"step {step:,}" if isinstance(step, int) else "", str(reason or "")]
    evals, errors = _finite(run, "eval_loss"), _finite(run, "eval_loss_se")
    part = f", +- {number_text(ERRORS_SHOWN * list(errors.values())[-1])} (95 %)" if errors else ""
    best = min(evals, key=evals.__getitem__, default=0)
    redone = f"{counted(sum(run.steps_redone), 'step')} repeated" if any(run.steps_redone) else ""
    num_evals = f"{counted(len(evals), 'evaluation')}{part}, "
    last = float(run.steps[-1]) if run.steps else None
    tokens = _last_row("Tokens seen", _finite(run, "tokens_seen"), "tokens")
    parameters, full = (run.environment.get(key) for key in ("parameters", "tokens_per_step"))
    ratio = tokens.value / parameters if parameters and isinstance(tokens.value, float) else None
    bits = {at: f"{number_text(value)} bits/byte, " for at, value in _finite(run, "eval_bits_per_byte").items()}
    final = bits.get(max(evals, default=0), "")
    return [
        SummaryRow("State", str(state) if state else None, note=": ".join(filter(None, reached))),
        SummaryRow("Steps", last, note=f"the last of {rows_text(run.steps)}" if run.steps else ""),
        _time(run),
        tokens,
        SummaryRow("Parameters", float(parameters) if parameters else None),
        SummaryRow("Tokens per parameter", ratio),
        _middle("Batch", run, "tokens_in_step", "tokens/step", "mean", f"of at most {full:,}, " if full else ""),
        _middle("Fill", run, "data/fill", "of full rows", "mean"),
        _middle("Speed", run, "tokens_per_sec", "tokens/s"),
        _middle("MFU", run, "mfu", "of the peak"),
        _last_row("Peak memory", _finite(run, "gpu/peak_gb"), "GB"),
        _last_row("Held-out loss", evals, "nats/token", f"{final}last of {num_evals}"),
        _last_row("Best held-out loss", evals, "nats/token", f"{bits.get(best, '')}best of {num_evals}", best),
        *_losses(run, window),
        _noise_scale(run),
        _total("Cold starts", run, ["ledger/cold_starts"], "cells"),
        _total("False evictions", run, keys_under("ledger/false_evictions/"), "groups"),
        _total("Rejected steps", run, ["non_finite_steps"], "steps"),
        SummaryRow("Restarts", float(len(run.restarts)), note=redone),
    ]


def summaries(runs: Sequence[RunRecord], window: int | None = None) -> list[tuple[SummaryRow, ...]]:
    """The results that any of the runs has, those of all side by side."""
    rows = zip(*(summarize(run, window=window) for run in runs), strict=True)
    return [results for results in rows if any(each.value is not None or each.note for each in results)]


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs labeled by the shortest path suffixes that differ; runs with the same path are numbered."""
    parts = [run.path.absolute().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    labels = ["/".join(part[-depth:]) for part in parts]
    earlier = [labels[:number].count(label) for number, label in enumerate(labels)]
    numbers = [f" ({count + 1})" if count else "" for count in earlier]
    return [replace(run, label=label + number) for run, label, number in zip(runs, labels, numbers, strict=True)]


def value_text(value: Any) -> str:
    """A config value as JSON; a dash for None. One that a resume changed: `0.01; 0.001 from step 31 on`."""
    if isinstance(value, Mapping) and value:
        first, *later = value.items()
        parts = [value_text(first[1]), *(f"{value_text(each)} from step {step:,} on" for step, each in later)]
        return "; ".join(parts)[:_MOST_TEXT]
    return "–" if value is None else json.dumps(value, ensure_ascii=False, default=str)[:_MOST_TEXT]


def _strict(value: Any) -> Any:
    """A value as strict JSON has it, which has neither nan nor inf; by step if it is."""
    if isinstance(value, dict):
        return {step: _strict(each) for step, each in value.items()}
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) for settings that differ; None where a run does not have the key.

    For the keys see `recorded_settings`. A value that a resume changed is a mapping, as in `settings_by_step`.
    """
    settings = [{**recorded_settings(run.config, run.environment), **settings_by_step(run)} for run in runs]
    flat = [{key: _strict(value) for key, value in one.items()} for one in settings]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _end_mean(run: RunRecord, end: End, key: str, *, is_averaged: bool) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the end of a run; the last value if the key is not averaged or not logged there."""
    column = _finite(run, key)
    values = [value for step, value in column.items() if step >= end.first] if is_averaged else []
    if not values:
        return next(reversed(column.values()), None), None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def key_means(first: RunRecord, second: RunRecord, *, window: int | None = None) -> list[KeyMean]:
    """Every key of either run, averaged over the end of each run (`end_of`), in order of appearance.

    Evaluations within these steps are averaged too. For counters, schedules and running averages, and for keys that are not
    logged within these steps, the last value is given.
    """
    ends = [(run, end_of(run, window)) for run in (first, second)]
    rows = []
    for key in dict.fromkeys([*first.keys, *second.keys]):
        is_averaged = key not in _NOT_AVERAGED and not key.startswith(_NOT_AVERAGED_PREFIXES)
        (mean_a, deviation_a), (mean_b, deviation_b) = (_end_mean(*end, key, is_averaged=is_averaged) for end in ends)
        difference = None if mean_a is None or mean_b is None else mean_b - mean_a
        relative = None if difference is None or not mean_a else difference / abs(mean_a)
        unit = lookup(key).unit if is_known(key) else ""
        means, deviations = (mean_a, mean_b), (deviation_a, deviation_b)
        rows.append(KeyMean(key, unit, means, deviations, not is_averaged, difference, relative))
    return rows


@dataclass(frozen=True)
class Spread:
    """A result over seeds.

    Attributes:
        mean: over `n` seeds; of a seed that was run several times, the mean of these counts once.
        deviation: standard deviation with n - 1; None for one seed, which says nothing about the spread.
    """

    mean: float
    deviation: float | None
    n: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.n)


@dataclass(frozen=True)
class Excess:
    """How much higher a mean is than the best one.

    Attributes:
        error: standard error of the difference, sqrt(error_1^2 + error_2^2), as of independent seeds; None if one of the two
            has a single seed.
        is_resolved: whether it exceeds `ERRORS_WIDE` standard errors; None without an error bar.
    """

    difference: float
    error: float | None
    is_resolved: bool | None


@dataclass(frozen=True)
class SeedGroup:
    """Runs with the same settings.

    Attributes:
        results: of each run, the numbers of `summarize` by label.
        settings: of the keys in which any of the compared runs differ, the seed aside.
        outcome, units: by label of `summarize`; labels without a number are left out.
    """

    diagnoses: tuple[Diagnosis, ...]
    results: tuple[Mapping[str, float], ...]
    settings: Mapping[str, Any]
    outcome: Mapping[str, Spread]
    units: Mapping[str, str]

    @property
    def runs(self) -> list[RunRecord]:
        """The runs."""
        return [diagnosis.run for diagnosis in self.diagnoses]

    def values(self, label: str) -> list[float]:
        """A result of each run that has it."""
        return [results[label] for results in self.results if label in results]

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds, in order; a run whose seed is not recorded is one of its own."""
        return list(dict.fromkeys(map(_seed, self.runs)))


def spread_of(values: Mapping[Any, Sequence[float]]) -> Spread:
    """The spread of at least one value by seed."""
    means = [statistics.fmean(of_seed) for of_seed in values.values()]
    deviation = statistics.stdev(means) if len(means) > 1 else None
    return Spread(statistics.fmean(means), deviation, len(means))


def excess(best: Spread, other: Spread) -> Excess:
    """The difference of two means, with its error bar if both have several seeds."""
    difference = other.mean - best.mean
    if best.error is None or other.error is None:
        return Excess(difference, None, None)
    error = math.hypot(best.error, other.error)
    return Excess(difference, error, abs(difference) > ERRORS_WIDE * error)


def _seed(run: RunRecord) -> Any:
    seed = run.setting(SEED)
    return seed if isinstance(seed, int) else str(run.path)


def seed_groups(diagnoses: Sequence[Diagnosis], *, window: int | None = None) -> tuple[str, list[SeedGroup]]:
    """(the label that they are ranked by, the groups, lowest mean first; those without a value last).

    Args:
        window: see `end_of`.
    """
    runs = [diagnosis.run for diagnosis in diagnoses]
    differing = {key: values for key, values in config_differences(runs) if key != SEED}
    columns = {key: values for key, values in differing.items() if not key.startswith("env.") or key == _WORLD_SIZE}
    members: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        # Runs whose settings are not recorded may have any.
        settings = [values[number] for values in columns.values()] if run.config else str(number)
        members.setdefault(json.dumps(settings, default=str), []).append(number)
    groups = [
        _group([diagnoses[at] for at in numbers], {key: values[numbers[0]] for key, values in columns.items()}, window)
        for numbers in members.values()
    ]
    label = next((label for label in RANKED_BY if any(label in group.outcome for group in groups)), RANKED_BY[-1])
    return label, sorted(groups, key=lambda group: group.outcome[label].mean if label in group.outcome else math.inf)


def _group(diagnoses: Sequence[Diagnosis], settings: Mapping[str, Any], window: int | None) -> SeedGroup:
    by_seed: dict[str, dict[Any, list[float]]] = {}
    units: dict[str, str] = {}
    results: list[dict[str, float]] = []
    for diagnosis in diagnoses:
        rows = summarize(diagnosis.run, window=window)
        results.append({row.label: row.value for row in rows if isinstance(row.value, float)})
        units |= {row.label: row.unit for row in rows}
        for label, value in results[-1].items():
            by_seed.setdefault(label, {}).setdefault(_seed(diagnosis.run), []).append(value)
    outcome = {label: spread_of(values) for label, values in by_seed.items()}
    return SeedGroup(tuple(diagnoses), tuple(results), settings, outcome, units)


def reservations(groups: Sequence[SeedGroup], label: str | None) -> Iterator[str]:
    """Why the rows may not compare, in words: state, length, data; with a label (that ranks them) also tokens and seeds."""
    runs = [run for group in groups for run in group.runs]
    unfinished = [
        f"{run.name} ({run.status.get('state') or 'unknown'})" for run in runs if run.status.get("state") != "done"
    ]
    if unfinished:
        yield f"not done: {few(unfinished)}"
    pairs = [pair for group in groups for pair in zip(group.runs, group.results, strict=True)]
    ends = {run.name: end["Steps"] for run, end in pairs if "Steps" in end}
    last = max(ends.values(), default=0.0)
    short = [f"{name} ({step:,.0f})" for name, step in ends.items() if step < last]
    if short:
        yield f"not equally long: the longest ended at step {last:,.0f}, earlier {few(short)}"
    differing = [
        key for key in groups[0].settings if key.startswith(_HELD_OUT_SETTINGS) and not key.endswith(".weight")
    ]
    if differing:
        yield f"held-out losses may be of different data: {few(differing)} differ"
    if label is not None:
        yield from _reservations_of_rows(groups, label)


def _reservations_of_rows(groups: Sequence[SeedGroup], label: str) -> Iterator[str]:
    bare = [run.name for group in groups for run in group.runs if not run.config]
    if bare:
        yield f"no config.resolved.toml, hence a row of its own: {few(bare)}"
    tokens = [statistics.fmean(seen) if (seen := group.values("Tokens seen")) else math.nan for group in groups]
    most = max((mean for mean in tokens if math.isfinite(mean)), default=0.0)
    fewer = [f"row {number} ({mean:,.0f})" for number, mean in enumerate(tokens, 1) if mean < (1 - TOKEN_MARGIN) * most]
    if fewer:
        yield f"not equally many tokens: up to {most:,.0f} on average of a row, fewer in {few(fewer)}"
    for number, group in enumerate(groups, 1):
        repeated = len(group.runs) - len(group.seeds)
        if repeated:
            yield f"row {number} has {len(group.runs)} runs of {len(group.seeds)} seeds; runs of one seed count as one"
        if label not in group.outcome:
            yield f"row {number} has no {label.lower()}"
        elif group.outcome[label].n < len(group.seeds):
            yield f"row {number} has a {label.lower()} for {group.outcome[label].n} of {len(group.seeds)} seeds"
        recorded = [key for key, _ in config_differences(group.runs) if key.startswith("env.") and key != _WORLD_SIZE]
        if recorded:
            yield f"recorded versions or machines differ within row {number}: {few(recorded)}"
    if any(len(group.seeds) == 1 for group in groups):
        yield "one seed has no error bar: a row of a single seed can be neither told from nor equated with another"
