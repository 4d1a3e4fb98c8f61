"""`train compare`: how runs differ in settings and outcome, and two of them key by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from typer import Option

from trainer.errors import UserError
from trainer.tools.verbs.shared import COLOURS, JsonOption, RunsArgument, output, print_json
from trainer.wording import number_text

if TYPE_CHECKING:
    from trainer.tools.diagnostics.diagnose import Diagnosis
    from trainer.tools.report.run_summary import KeyMean, SummaryRow
    from trainer.tools.runs.load import RunRecord

LAST_HELP = "Number of final rows to average (default: the last tenth, at most 20)."


def compare(
    paths: RunsArgument,
    last: Annotated[int | None, Option(min=1, help=LAST_HELP)] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs side by side; two of them key by key too."""
    from trainer.tools.diagnostics.diagnose import diagnose
    from trainer.tools.report.run_summary import reservations, with_distinct_names
    from trainer.tools.runs.load import load_run

    if len(paths) < 2:
        raise UserError("train compare", "needs at least two runs, got one", "train compare RUN_DIR RUN_DIR")
    runs = with_distinct_names([load_run(path) for path in paths])
    diagnoses, remarks = list(map(diagnose, runs)), list(reservations(runs))
    if as_json:
        print_json({**_as_json(diagnoses, last), "reservations": remarks})
        return
    tables = [_config_table(runs), _outcome_table(diagnoses, last)]
    if len(runs) == 2:
        tables.append(_means_table(runs, last))
    for table in tables:
        output().print(table)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    for text in [*remarks, *notes]:
        output().print(Text(text, style=COLOURS["warning"]))


def _as_json(diagnoses: Sequence[Diagnosis], window: int | None) -> dict[str, Any]:
    from trainer.tools.report.run_summary import config_differences, end_of, key_means, summarize

    runs = [diagnosis.run for diagnosis in diagnoses]
    found: dict[str, Any] = {"runs": [], "config": [], "outcome": [], "window": window}
    for each in diagnoses:
        names = [ruling.rule.name for ruling in each.findings]
        verdict = {"verdict": each.verdict, "findings": names, "notes": each.run.notes}
        found["runs"].append({"name": each.run.name, "path": str(each.run.path), **verdict})
    for key, values in config_differences(runs):
        found["config"].append({"key": key, "values": values})
    for rows in zip(*(summarize(run, window=window) for run in runs), strict=True):
        cells = {"values": [row.value for row in rows], "notes": [row.note for row in rows]}
        found["outcome"].append({"label": rows[0].label, "unit": rows[0].unit, **cells})
    found["ends"] = [asdict(end_of(run, window)) for run in runs]
    if len(runs) == 2:
        found["metrics"] = [asdict(row) for row in key_means(runs[0], runs[1], window=window)]
    return found


def _new_table(title: str, first: str, runs: Sequence[RunRecord], *more: str) -> Table:
    """A table with a column for each run."""
    style: dict[str, Any] = {"title_style": "bold", "header_style": "", "box": SIMPLE_HEAD, "pad_edge": False}
    table = Table(title=title, title_justify="left", **style)
    table.add_column(first, overflow="fold")
    for heading in [*(Text(run.name, style="bold") for run in runs), *map(Text, more)]:
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
    """The results of the runs, of two with their difference, and the verdicts."""
    from trainer.tools.report.run_summary import summaries

    runs = [diagnosis.run for diagnosis in diagnoses]
    more = ["difference"] if len(runs) == 2 else []
    table = _new_table("Outcome", "", runs, *more)
    for results in summaries(runs, window):
        cells: list[Text | str] = list(map(_result_cell, results))
        if more:
            first, second = (each.value for each in results)
            cells.append("")
            if isinstance(first, float) and isinstance(second, float):
                cells[-1] = _signed(second - first)
        table.add_row(results[0].heading, *cells)
    styles = {"healthy": COLOURS["healthy"], "findings": COLOURS["warning"]}
    briefs = [Text(each.brief.replace(", ", "\n"), style=styles.get(str(each.verdict), "dim")) for each in diagnoses]
    table.add_row("Verdict", *briefs)
    return table


def _result_cell(result: SummaryRow) -> Text:
    """The value; of a loss, a speed or epochs with what it is of, and a missing one with the reason."""
    note = ""
    if result.note and (result.unit in ("nats/token", "tokens/s", "epochs") or result.value is None):
        note = f"\n({result.note})"
    return Text.assemble(result.text, (note, "dim"))


def _means_table(runs: Sequence[RunRecord], window: int | None) -> Table:
    """The keys that differ; bold where the difference exceeds both standard deviations together."""
    from trainer.tools.report.run_summary import end_of, key_means

    means = key_means(runs[0], runs[1], window=window)
    title = "Final mean (of lr, counters, averages and what was not logged then: the last value)\n"
    title += "\n".join(f"{run.name}: {end_of(run, window)}" for run in runs)
    table = _new_table(title, "key", runs, "difference")
    differing = [row for row in means if row.difference != 0]
    for row in differing:
        _add_means(table, row)
    if len(differing) < len(means):
        table.caption_justify = "left"
        table.caption = f"{len(means) - len(differing)} other keys have the same mean in both"
    return table


def _add_means(table: Table, row: KeyMean) -> None:
    shown = []
    for mean, deviation in zip(row.means, row.standard_deviations, strict=True):
        text = "–" if mean is None else number_text(mean)
        if deviation:
            text += f" ± {number_text(deviation)}"
        shown.append(Text(text))
    difference = style = ""
    if row.difference is not None:
        difference = _signed(row.difference)
        # Single values have no deviation to exceed.
        scatter = [deviation for deviation in row.standard_deviations if deviation is not None]
        if scatter and abs(row.difference) > sum(scatter):
            style = "bold"
    table.add_row(Text(row.key), *shown, difference, style=style)


def _signed(value: float) -> str:
    if value == 0:
        return "0"
    sign = "+" if value > 0 else "-"
    return f"{sign}{number_text(abs(value))}"
