"""The results of a run, and how runs differ in settings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

from trainer.config.data_tables import EvalSourceTable, SourceTable
from trainer.config.load import flatten, recorded_settings
from trainer.metrics.catalog import ERRORS_SHOWN
from trainer.tools.diagnostics.state import FALSE_EVICTIONS
from trainer.tools.runs.load import Losses, RunRecord
from trainer.tools.runs.readings import loss_unit, noise_scale_of, number_text
from trainer.wording import counted

# The end of a run is its last tenth, but at most so many rows, or it would be all of a short run.
_MOST_ROWS, _MOST_TEXT = 20, 4_000
_DEFAULTS = flatten(SourceTable.model_construct().model_dump() | EvalSourceTable.model_construct().model_dump())
_T95 = {1: 12.706, 2: 4.303, 3: 3.182}  # Student's t where `t_quantile` is 1 % or more too large


@dataclass(frozen=True)
class SummaryRow:
    """One result of a run."""

    label: str
    value: float | str | None  # None if the run does not have it
    unit: str = ""
    note: str = ""  # the rows that it was made of, or why there is no value, in words
    error: float | None = None  # `ERRORS_SHOWN` are 95 %

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
        SummaryRow("Batch", _reduced(run, statistics.median, "tokens_in_step"), "tokens/step"),
        SummaryRow("Tokens seen", _reduced(run, _last, "tokens_seen"), "tokens"),
        SummaryRow("Data read", _reduced(run, _last, "data/epochs_most"), "epochs at most"),
        SummaryRow("Parameters", float(run.environment.get("parameters") or 0) or None),
        SummaryRow("Fill", _reduced(run, statistics.fmean, "data/fill"), "of the positions"),
        SummaryRow("Speed", _reduced(run, statistics.median, "tokens_per_sec"), "tokens/s"),
        SummaryRow("MFU", _reduced(run, statistics.median, "mfu"), "of the peak"),
        SummaryRow("Peak memory", _reduced(run, max, "gpu/peak_gb"), "GB"),
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
    times, label = _finite(run, "step_time_sec"), "Time of all steps"
    if not times:
        return SummaryRow(label, None, "s")
    # A run that begins as a branch of another one counts its own steps alone.
    begins = [each.global_step for each in run.restarts if each.global_step < min(times)]
    before = [min(begins, default=0), *times]
    seconds = sum(mean * (step - last) for last, (step, mean) in zip(before, times.items(), strict=False))
    note = f"{timedelta(seconds=round(min(seconds, 1e13)))} without evaluations and checkpoints"  # the most it takes
    return SummaryRow(label, seconds, "s", note)


def _held_out(run: RunRecord) -> SummaryRow:
    """The last held-out loss, with its error, and the lowest one."""
    (steps, losses), errors = run.column("eval_loss"), _finite(run, "eval_loss_se")
    if not steps:
        return SummaryRow("Held-out loss", None, loss_unit(run))
    notes, finite = [f"step {steps[-1]:,}"], _finite(run, "eval_loss")
    if steps[-1] in errors:
        notes.insert(0, f"+- {number_text(ERRORS_SHOWN * errors[steps[-1]])} (95 %)")
    if finite:
        best = min(finite, key=finite.__getitem__)
        notes.append(f"best {number_text(finite[best])} at step {best:,}")
    if documents := run.document_losses[0].get("eval_loss"):
        tokens = sum(tokens for _, tokens in documents.values())
        notes.append(f"{counted(len(documents), 'document')}, {counted(tokens, 'token')}")
    return SummaryRow("Held-out loss", losses[-1], loss_unit(run), ", ".join(notes))


def _final_loss(run: RunRecord) -> SummaryRow:
    """The mean loss of the last rows, a tenth of them, that have a finite one."""
    losses, label, unit = _finite(run, "loss"), "Final loss", loss_unit(run)
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
    rows = [*zip(*map(summarize, runs), strict=True)]
    if len(runs) > 1:
        rows += _paired(runs)
    return [results for results in rows if any(each.value is not None or each.note for each in results)]


def _paired(runs: Sequence[RunRecord]) -> Iterator[tuple[SummaryRow, ...]]:
    """The held-out losses minus those of the first run with recorded ones, over the same documents."""
    held = [run.document_losses for run in runs]
    first = next((number for number, (own, _) in enumerate(held) if own), 0)
    label = f"minus that of {runs[first].name}"
    for key, losses in (held[first][0] or {"eval_loss": {}}).items():
        row = []
        for number, (own, problem) in enumerate(held):
            value, error, note = None, None, problem
            if own and _targets_of(runs[number]) != _targets_of(runs[first]):
                note = "of other tokens or targets"
                if all("eval_bits_per_byte" in run.keys for run in (runs[number], runs[first])):
                    note += ": compare bits per byte"
            elif key in own and number != first:
                value, error, note = _difference(losses, own[key])
                ours, theirs = max(runs[number].evals.steps), max(runs[first].evals.steps)
                if ours != theirs:
                    note += f", step {ours:,} against {theirs:,}"
                if runs[number].environment.get("data") != runs[first].environment.get("data"):
                    note += "; the runs' data files differ"
            row.append(SummaryRow(f"{key} {label}", value, loss_unit(*runs), note, error))
        yield tuple(row)


def _targets_of(run: RunRecord) -> list[Any]:
    """What is predicted: tokens, or numbers; and by which loss."""
    keys = ("tokenizer", "vocab_size", "parse_special", "eod", "columns", "targets")
    return [run.setting("objective.target"), *(run.setting(f"data.{key}") for key in keys)]


def _difference(before: Losses, after: Losses) -> tuple[float | None, float | None, str]:
    """The mean loss per token of `after` minus that of `before` over the documents that both have read
    as far, its error, and both in words.

    With d the difference of a document's losses and w its tokens, it is the ratio sum(d) / sum(w), and
    its error that of `Moments` (Cochran 1977, section 6.4): how hard each document is cancels.
    """
    import numpy as np  # which a diagnosis of one run does not need

    from trainer.lab.moments import Moments

    both = [where for where in before if where in after and before[where][1] == after[where][1]]
    tokens = np.array([before[where][1] for where in both], np.float64)
    moments = Moments.of(np.array([after[where][0] - before[where][0] for where in both]), tokens)
    error, shown = moments.wide_error(), f"{counted(len(both), 'document')} in common"
    if not both:  # a sample goes by the time between evaluations
        return None, None, f"{shown}: by batch size and eval.*; train eval reads all"
    if not math.isfinite(error):
        return None, None, f"{shown}: too few for an error, or not finite"
    note = f"+- {number_text(ERRORS_SHOWN * error)} (95 %), {shown}, {counted(tokens.sum(), 'token')}"
    return moments.mean(), error, note


def over_seeds(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Means of the last held-out loss over runs that share all but `run.seed`: settings, also those that
    a resume changed, ranks, machine, versions and step. Of runs with one seed the first counts, of
    those without recorded settings none.

    A group is also compared with the first one of its step, by the seeds that both have: `minus`.
    `error`: of the mean, by Student's t; `ERRORS_SHOWN` are 95 %. None for one seed.
    """
    groups: dict[tuple[str, int], dict[str, RunRecord]] = {}
    left_out = []
    for run in runs:
        settings, (steps, losses) = recorded_settings(run.config, run.environment), run.evals.column("eval_loss")
        seed = value_text(settings.pop("run.seed", None))
        changed = [each.details["changed"] for each in run.restarts if each.details.get("changed")]
        same = json.dumps([settings, changed], sort_keys=True, default=str)
        if run.status.get("state") in ("failed", "died") or not (steps and math.isfinite(losses[-1])):
            left_out.append(run.name)
        elif run.config:
            groups.setdefault((same, steps[-1]), {}).setdefault(seed, run)
    found: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    first: dict[int, dict[str, RunRecord]] = {}
    for (_, step), group in groups.items():
        names = [run.name for run in group.values()]
        mean, error, shown = _mean_of_seeds([*map(_last_loss, group.values())])
        text = f"{', '.join(names)}: held-out loss {number_text(mean, 5)}, {shown}"
        before = first.setdefault(step, group)
        common = [seed for seed in group if seed in before]
        if not all(_read_the_same(before[seed], group[seed]) for seed in common):
            common, text = [], f"{text}; not compared: it has read other documents, parts or targets"
        found.append({"runs": names, "mean": mean, "error": error, "text": text})
        if before is not group and len(common) > 1:
            ours, minus = ([each[seed].name for seed in common] for each in (group, before))
            gains = [_last_loss(group[seed]) - _last_loss(before[seed]) for seed in common]
            mean, error, shown = _mean_of_seeds(gains)
            text = f"{', '.join(ours)} minus {', '.join(minus)}, "
            text += f"seed by seed: {number_text(mean, 5)}, {shown}"
            pairs.append({"runs": ours, "minus": minus, "mean": mean, "error": error, "text": text})
    if left_out:
        text = f"{', '.join(left_out)}: left out, failed or without a held-out loss"
        pairs.append({"runs": left_out, "mean": None, "error": None, "text": text})
    return found + pairs


def _last_loss(run: RunRecord) -> float:
    return run.evals.column("eval_loss")[1][-1]


def _read_the_same(run: RunRecord, other: RunRecord) -> bool:
    """Whether two runs were evaluated on the same targets, as far as their files say."""
    documents = [each.document_losses[0].get("eval_loss", {}) for each in (run, other)]
    before, after = ({where: tokens for where, (_, tokens) in each.items()} for each in documents)
    return _targets_of(run) == _targets_of(other) and (before == after or not before or not after)


def _mean_of_seeds(values: Sequence[float]) -> tuple[float, float | None, str]:
    """Mean, its error and that in words."""
    from trainer.metrics.noise_scale import t_quantile

    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return mean, None, "one seed: its scatter over seeds is not known"
    quantile = _T95.get(freedom) or t_quantile(1.96, freedom)
    error = quantile / ERRORS_SHOWN * statistics.stdev(values) / math.sqrt(len(values))
    return mean, error, f"+- {number_text(ERRORS_SHOWN * error)} (95 %), mean of {len(values)} seeds"


def value_text(value: Any) -> str:
    """A config value as JSON, up to `_MOST_TEXT` characters of it; a dash for None."""
    if value is None:
        return "–"
    return json.dumps(value, ensure_ascii=False, default=str)[:_MOST_TEXT]


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """(key, its value in each run) for settings that differ; None where a run lacks one.

    Keys are those of `recorded_settings`; values are those of the last launch. Of a source that not
    all runs have, only what it sets.
    """
    flat = [recorded_settings(run.config, run.environment) for run in runs]
    known = [one for one in flat if one]  # a run may have no record of its settings
    unset: dict[str, Any] = {}
    for table in ("data.source", "eval.source"):
        names = [set(one.get(f"{table}[].name") or ()) for one in known]
        for name in set().union(*names) - set.intersection(*names or [set()]):
            unset |= {f"{table}.{name}.{key}": value for key, value in _DEFAULTS.items()}
    found = []
    for key in dict.fromkeys(key for one in flat for key in one):
        values = [one.get(key) for one in known]
        if any(value != values[0] for value in values) and any(value not in (None, unset.get(key)) for value in values):
            found.append((key, [one.get(key) for one in flat]))
    return found
