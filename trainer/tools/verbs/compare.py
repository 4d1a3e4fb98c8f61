"""`train compare`: how runs differ in settings, outcome and, two of them, key by key."""

from __future__ import annotations

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
    from trainer.tools.report.run_summary import SummaryRow

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
    output().print(_table(diagnoses, last))
    if not any(run.config or run.environment for run in runs):
        remarks.append("no run has recorded its settings: they cannot be compared")
    for text in [*remarks, *(f"{run.name}: {note}" for run in runs for note in run.notes)]:
        output().print(Text(text, style=COLOURS["warning"]))


def _as_json(diagnoses: list[Diagnosis], window: int | None) -> dict[str, Any]:
    from trainer.tools.report.run_summary import config_differences, end_of, key_means, summarize

    runs, found = [each.run for each in diagnoses], []
    for each in diagnoses:
        verdict = {"verdict": each.verdict, "findings": [ruling.rule.name for ruling in each.findings]}
        steps = {"end": end_of(each.run, window), "notes": each.run.notes}
        found.append({"name": each.run.name, "path": str(each.run.path), **verdict, **steps})
    outcome = []
    for rows in zip(*(summarize(run, window=window) for run in runs), strict=True):
        cells = {"values": [row.value for row in rows], "notes": [row.note for row in rows]}
        outcome.append({"label": rows[0].label, "unit": rows[0].unit, **cells})
    return {
        "runs": found,
        "config": [{"key": key, "values": values} for key, values in config_differences(runs)],
        "outcome": outcome,
        "metrics": [asdict(row) for row in key_means(runs, window=window)],
    }


def _table(diagnoses: list[Diagnosis], window: int | None) -> Table:
    """A column for each run: the settings that differ, the results and verdicts, and the means of two runs."""
    from trainer.tools.report.run_summary import config_differences, key_means, summaries, value_text

    runs = [each.run for each in diagnoses]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(overflow="fold")
    for heading in [*(run.name for run in runs), *["difference"] * (len(runs) == 2)]:
        table.add_column(Text(heading), justify="right", overflow="fold")
    differing = config_differences(runs)
    for key, values in differing or [("no setting differs", [])]:
        table.add_row(Text(key), *(Text(value_text(value)) for value in values))
    table.add_section()
    for results in summaries(runs, window):
        difference = _difference([each.value for each in results])
        table.add_row(results[0].heading, *map(_result_cell, results), difference)
    styles = {"healthy": COLOURS["healthy"], "findings": COLOURS["warning"]}
    briefs = [Text(each.brief.replace(", ", "\n"), style=styles.get(str(each.verdict), "dim")) for each in diagnoses]
    table.add_row("Verdict", *briefs)
    if len(runs) > 2:  # every key of them fits no terminal
        return table
    table.add_section()
    for row in key_means(runs, window=window):
        difference = _difference(row.means)
        if difference != "0":
            cells = map(_mean_cell, row.means, row.standard_deviations)
            table.add_row(Text(f"{row.key}{' (last)' * row.is_last}"), *cells, difference)
    return table


def _result_cell(result: SummaryRow) -> Text:
    """The value; of a loss, epochs or a state with what it is of, and a missing one with the reason."""
    note = ""
    if result.note and (result.label == "State" or result.unit in ("nats/token", "epochs") or result.value is None):
        note = f"\n({result.note})"
    return Text.assemble(result.text, (note, "dim"))


def _mean_cell(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "–"
    if not deviation:
        return number_text(mean)
    return f"{number_text(mean)} ± {number_text(deviation)}"


def _difference(values: list[Any]) -> str:
    """The second number minus the first; empty for more of them, and where one is missing."""
    first, second, *others = values
    if others or not isinstance(first, float) or not isinstance(second, float):
        return ""
    sign = "+" if second > first else ""
    return f"{sign}{number_text(second - first)}"
