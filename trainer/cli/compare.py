"""`train compare`: how two runs differ, in the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.diagnostics.diagnose import Diagnosis, Ruling, diagnose
from trainer.report.markup import value_text
from trainer.report.names import with_distinct_names
from trainer.report.run_summary import KeyMean, SummaryRow, config_differences, end_of, key_means, summarize
from trainer.runs.load import RunRecord, load_run
from trainer.runs.wording import number_text

# A pipe has no width; a line there should not be cut.
_PIPE_WIDTH = 160


def compare_runs(first: str, second: str, *, window: int | None, as_json: bool) -> None:
    """Print what differs: settings, outcome, and the mean of each key at the end (`end_of`).

    Raises:
        UserError: a path is no run.
    """
    runs = with_distinct_names([load_run(first), load_run(second)])
    diagnoses = [diagnose(run) for run in runs]
    means = key_means(runs[0], runs[1], window=window)
    if as_json:
        typer.echo(json.dumps(_as_json(diagnoses, means, window), indent=2, allow_nan=False, default=str))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    for part in (_config_table(runs), _outcome_table(diagnoses, window), _means_table(runs, means, window)):
        console.print(part)
    for run in runs:
        for note in run.notes:
            console.print(Text(f"{run.name}: {note}", style="yellow"))


def _as_json(diagnoses: Sequence[Diagnosis], means: Sequence[KeyMean], window: int | None) -> dict[str, Any]:
    runs = [diagnosis.run for diagnosis in diagnoses]
    outcomes = [summarize(run, window=window) for run in runs]
    return {
        "runs": [
            {
                "name": diagnosis.run.name,
                "path": str(diagnosis.run.path),
                "verdict": diagnosis.verdict,
                "remarks": [_remark(ruling) for ruling in diagnosis.by_severity] if diagnosis.verdict else [],
                "notes": diagnosis.run.notes,
            }
            for diagnosis in diagnoses
        ],
        "config": [{"key": key, "values": values} for key, values in config_differences(runs)],
        "outcome": [
            {"label": a.label, "unit": a.unit, "values": [a.value, b.value], "notes": [a.note, b.note]}
            for a, b in zip(*outcomes, strict=True)
        ],
        "window": window,
        "ends": [asdict(end_of(run, window)) for run in runs],
        "metrics": [
            {
                "key": row.key,
                "unit": row.unit,
                "means": row.means,
                "is_last": row.is_last,
                "standard_deviations": row.deviations,
                "difference": row.difference,
                "relative": row.relative,
            }
            for row in means
        ],
    }


def _remark(ruling: Ruling) -> dict[str, Any]:
    outcome = ruling.outcome
    return {
        "rule": ruling.rule.name,
        "severity": ruling.severity,
        "text": outcome.sentence,
        "setting": str(outcome.knob) if outcome.knob is not None else "",
        "steps": ruling.steps,
    }


def _new_table(title: str, first: str, runs: Sequence[RunRecord], *more: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column(first, overflow="fold")
    for run in runs:
        table.add_column(Text(run.name, style="bold"), justify="right", overflow="fold")
    for heading in more:
        table.add_column(heading, justify="right")
    return table


def _config_table(runs: Sequence[RunRecord]) -> Table | Text:
    rows = config_differences(runs)
    if not rows:
        return Text("No setting and no recorded version differs.")
    table = _new_table("Settings that differ", "setting", runs)
    for key, values in rows:
        table.add_row(Text(key), *(Text(value_text(value)) for value in values))
    return table


def _outcome_table(diagnoses: Sequence[Diagnosis], window: int | None) -> Table:
    runs = [diagnosis.run for diagnosis in diagnoses]
    table = _new_table("Outcome", "", runs, "difference")
    for first, second in zip(*(summarize(run, window=window) for run in runs), strict=True):
        label = f"{first.label} ({first.unit})" if first.unit else first.label
        difference = ""
        if isinstance(first.value, float) and isinstance(second.value, float):
            difference = _signed(second.value - first.value)
        # What a loss covers belongs to it; the rest says itself, or is on the report's page.
        cells = [_with_note(fact) if fact.unit == "nats/token" else Text(fact.text) for fact in (first, second)]
        table.add_row(label, *cells, difference)
    words = [
        "\n".join(ruling.title for ruling in diagnosis.findings) or diagnosis.verdict or "not diagnosed"
        for diagnosis in diagnoses
    ]
    table.add_row("Verdict", *(Text(cell, style="green" if cell == "healthy" else "yellow") for cell in words), "")
    return table


def _with_note(fact: SummaryRow) -> Text:
    note = f"\n({fact.note})" if fact.note and fact.value is not None else ""
    return Text.assemble(fact.text, (note, "dim"))


def _means_table(runs: Sequence[RunRecord], means: Sequence[KeyMean], window: int | None) -> Table:
    """Keys that differ; those that differ by more than the values scatter stand out."""
    same = [row.key for row in means if row.difference == 0]
    title = "Mean at the end (of lr, counters and running averages the last value)\n"
    title += "\n".join(f"{run.name}: {end_of(run, window)}" for run in runs)
    table = _new_table(title, "key", runs, "difference", "in %")
    for row in means:
        if row.difference == 0:
            continue
        style = "bold" if _stands_out(row) else ""
        relative = f"{100 * row.relative:+.1f}" if row.relative is not None else ""
        difference = _signed(row.difference) if row.difference is not None else ""
        table.add_row(Text(row.key), *map(_with_scatter, row.means, row.deviations), difference, relative, style=style)
    if same:
        table.caption, table.caption_justify = f"{len(same)} other keys have the same mean in both", "left"
    return table


def _stands_out(row: KeyMean) -> bool:
    """Whether the means lie further apart than both scatters together; of single values nobody knows."""
    if row.deviations == (None, None):
        return False
    scatter = sum(deviation or 0.0 for deviation in row.deviations)
    return row.difference is not None and abs(row.difference) > scatter


def _with_scatter(mean: float | None, deviation: float | None) -> Text:
    if mean is None:
        return Text("–")
    around = f" ± {number_text(deviation)}" if deviation else ""
    return Text(f"{number_text(mean)}{around}")


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{number_text(abs(value))}"
