"""Runs that differ in their seed alone as one row: mean and spread over seeds, and which differences exceed chance."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.report.run_summary import config_differences, summarize
from trainer.tools.runs.load import RunRecord
from trainer.wording import few

SEED: Final = "run.seed"
ERRORS_WIDE: Final = 2.0
"""Standard errors of a difference below which it may well be chance."""
TOKEN_MARGIN: Final = 0.05  # steps differ in tokens, and so runs of equally many steps a little, by their seed
RANKED_BY: Final = ("Held-out loss", "Final loss")
_WORLD_SIZE: Final = "env.world_size"  # changes the batch; other recorded values should not change a result
_HELD_OUT_SETTINGS: Final = (
    "eval.",
    "data.source",
    "data.tokenizer",
    "data.seq_len",
    "data.max_group_cells",
    "data.pack",
)


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
    """

    difference: float
    error: float | None

    @property
    def is_resolved(self) -> bool | None:
        """Whether it exceeds `ERRORS_WIDE` standard errors; None without an error bar."""
        return None if self.error is None else abs(self.difference) > ERRORS_WIDE * self.error


@dataclass(frozen=True)
class SeedGroup:
    """Runs with the same settings.

    Attributes:
        results: of each run, the numbers of `summarize` by label.
        settings: of the keys in which any of the compared runs differ, the seed aside.
        outcome: by label of `summarize`; labels without a number are left out.
        units: by label.
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
    errors = best.error, other.error
    error = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
    return Excess(other.mean - best.mean, error)


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


def reservations(label: str, groups: Sequence[SeedGroup]) -> list[str]:
    """Why the rows may not compare, in words: length, state, data, seeds."""
    return [*reservations_of_runs(groups), *_of_rows(label, groups)]


def reservations_of_runs(groups: Sequence[SeedGroup]) -> Iterable[str]:
    """Those of them that do not need more than one run in a row."""
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


def _of_rows(label: str, groups: Sequence[SeedGroup]) -> Iterable[str]:
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
