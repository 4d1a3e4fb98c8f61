"""`train compare`: how two runs differ, or how many rank with seeds grouped; in the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from trainer.cli.options import JsonOption
from trainer.cli.terminal import COLOURS, echo, output
from trainer.errors import UserError
from trainer.tools.fitted_table import folded

_KEY_WIDTH = 26  # of a folded key, so that a row of two runs fits into 80 characters
_NO_LIMIT = 10_000

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.tools.diagnostics.diagnose import Diagnosis, Ruling
    from trainer.tools.report.run_summary import KeyMean, SummaryRow
    from trainer.tools.runs.load import RunRecord


def compare(
    paths: Annotated[
        list[str],
        typer.Argument(help="Two or more run directories, or metrics.jsonl files.", metavar="RUN_DIR RUN_DIR..."),
    ],
    last: Annotated[
        int | None, typer.Option(min=1, help="Number of final rows to average (default: the last tenth, at most 20).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: two key by key; more as a table, where runs that differ in the seed alone are one row."""
    from trainer.tools.diagnostics.diagnose import diagnose
    from trainer.tools.report.run_summary import key_means, with_distinct_names
    from trainer.tools.report.seed_groups import reservations_of_runs, seed_groups
    from trainer.tools.runs.load import load_run

    if len(paths) < 2:
        raise UserError("train compare", "needs at least two runs, got one", "train compare RUN_DIR RUN_DIR")
    runs = with_distinct_names([load_run(path) for path in paths])
    diagnoses = [diagnose(run) for run in runs]
    if len(runs) > 2:
        _compare_many(diagnoses, last, as_json=as_json)
        return
    means = key_means(runs[0], runs[1], window=last)
    if as_json:
        echo(json.dumps(_as_json(diagnoses, means, last), indent=2, allow_nan=False, default=str))
        return
    console = output()
    for part in (_config_table(runs), _outcome_table(diagnoses, last), _fitted_means(console, runs, means, last)):
        console.print(part)
    for remark in reservations_of_runs(seed_groups(diagnoses, window=last)[1]):
        console.print(Text(remark, style=COLOURS["warning"]))
    _print_notes(runs)


def _compare_many(diagnoses: Sequence[Diagnosis], window: int | None, *, as_json: bool) -> None:
    from trainer.tools.verbs.seed_table import groups_as_json, print_groups

    if as_json:
        echo(json.dumps(groups_as_json(diagnoses, window), indent=2, allow_nan=False, default=str))
        return
    print_groups(diagnoses, window)
    _print_notes([diagnosis.run for diagnosis in diagnoses])


def _print_notes(runs: Sequence[RunRecord]) -> None:
    for run in runs:
        for note in run.notes:
            output().print(Text(f"{run.name}: {note}", style=COLOURS["warning"]))


def _as_json(diagnoses: Sequence[Diagnosis], means: Sequence[KeyMean], window: int | None) -> dict[str, Any]:
    from trainer.tools.report.run_summary import config_differences, end_of, summarize
    from trainer.tools.report.seed_groups import reservations_of_runs, seed_groups

    runs = [diagnosis.run for diagnosis in diagnoses]
    outcomes = [summarize(run, window=window) for run in runs]
    return {
        "runs": [
            {
                "name": diagnosis.run.name,
                "path": str(diagnosis.run.path),
                "verdict": diagnosis.verdict,
                "rules_judged": diagnosis.num_judged,
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
        "metrics": [_metric_as_json(row) for row in means],
        "reservations": list(reservations_of_runs(seed_groups(diagnoses, window=window)[1])),
    }


def _metric_as_json(row: KeyMean) -> dict[str, Any]:
    """Its fields, and what follows from them."""
    content = asdict(row)
    content["standard_deviations"] = content.pop("deviations")
    return {**content, "difference": row.difference, "relative": row.relative}


def _remark(ruling: Ruling) -> dict[str, Any]:
    outcome = ruling.outcome
    return {
        "rule": ruling.rule.name,
        "severity": ruling.severity,
        "text": outcome.sentence,
        "setting": ruling.fix.removeprefix("try "),
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
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _config_table(runs: Sequence[RunRecord]) -> Table | str:
    from trainer.tools.report.run_summary import config_differences, value_text

    rows = config_differences(runs)
    if not any(run.config or run.environment for run in runs):
        return "No run has recorded its settings: they cannot be compared."
    if not rows:
        return "No setting and no recorded version differs."
    table = _new_table("Settings that differ", "setting", runs)
    for key, values in rows:
        table.add_row(Text(key), *(Text(value_text(value)) for value in values))
    return table


def _outcome_table(diagnoses: Sequence[Diagnosis], window: int | None) -> Table:
    from trainer.tools.report.run_summary import heading, summarize

    runs = [diagnosis.run for diagnosis in diagnoses]
    table = _new_table("Outcome", "", runs, "difference")
    for first, second in zip(*(summarize(run, window=window) for run in runs), strict=True):
        difference = ""
        if isinstance(first.value, float) and isinstance(second.value, float):
            difference = _signed(second.value - first.value)
        table.add_row(heading([first, second]), _fact_cell(first), _fact_cell(second), difference)
    cells = []
    for diagnosis in diagnoses:
        word = diagnosis.brief if diagnosis.verdict else "not diagnosed"
        text = "\n".join(ruling.title for ruling in diagnosis.findings) or word
        style = {"healthy": "healthy", "no_findings": "unknown"}.get(str(diagnosis.verdict), "warning")
        cells.append(Text(text, style=COLOURS[style]))
    table.add_row("Verdict", *cells, "")
    return table


def _fact_cell(fact: SummaryRow) -> Text:
    """The value; of a loss with what it covers, and a missing one with the reason. Other notes are on the report's page."""
    has_note = fact.note and (fact.unit == "nats/token" or fact.value is None)
    return Text.assemble(fact.text, (f"\n({fact.note})" if has_note else "", "dim"))


def _fitted_means(console: Console, runs: Sequence[RunRecord], means: Sequence[KeyMean], window: int | None) -> Table:
    """On one line per key, or, where that is too wide, with keys and scatter folded."""
    table = _means_table(runs, means, window)
    is_wide = console.measure(table, options=console.options.update(width=_NO_LIMIT)).maximum > console.width
    return _means_table(runs, means, window, is_folded=True) if is_wide else table


def _means_table(
    runs: Sequence[RunRecord], means: Sequence[KeyMean], window: int | None, *, is_folded: bool = False
) -> Table:
    """Keys that differ; bold where the difference exceeds the scatter of the values."""
    from trainer.tools.report.run_summary import end_of

    title = "Final mean (the last value of lr, counters and running averages)\n"
    title += "\n".join(f"{run.name}: {end_of(run, window)}" for run in runs)
    table = _new_table(title, "key", runs, "difference", "in %")
    differing = [row for row in means if row.difference != 0]
    for row in differing:
        style = "bold" if _exceeds_scatter(row) else ""
        relative = f"{100 * row.relative:+.1f}" if row.relative is not None else ""
        difference = _signed(row.difference) if row.difference is not None else ""
        cells = [_with_scatter(*cell) for cell in zip(row.means, row.deviations, strict=True)]
        key = folded(row.key, _KEY_WIDTH) if is_folded else row.key
        shown = [Text(cell.replace(" ±", "\n±") if is_folded else cell) for cell in cells]
        table.add_row(Text(key), *shown, difference, relative, style=style)
    if len(differing) < len(means):
        table.caption_justify = "left"
        table.caption = f"{len(means) - len(differing)} other keys have the same mean in both"
    return table


def _exceeds_scatter(row: KeyMean) -> bool:
    """Whether the means lie further apart than both standard deviations together; False for single values."""
    if row.deviations == (None, None):
        return False
    scatter = sum(deviation or 0.0 for deviation in row.deviations)
    return row.difference is not None and abs(row.difference) > scatter


def _with_scatter(mean: float | None, deviation: float | None) -> str:
    from trainer.wording import number_text

    if mean is None:
        return "–"
    return number_text(mean) + (f" ± {number_text(deviation)}" if deviation else "")


def _signed(value: float) -> str:
    from trainer.wording import number_text

    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{number_text(abs(value))}"
