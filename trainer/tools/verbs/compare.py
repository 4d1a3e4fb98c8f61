"""`train compare`: how two runs differ, or how many rank with seeds grouped; in the terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.cli.options import JsonOption, RunsArgument
from trainer.cli.terminal import COLOURS, output, print_json
from trainer.errors import UserError
from trainer.tools.fitted_table import Column, fitted_table, needed_width
from trainer.wording import few, number_text

if TYPE_CHECKING:
    from trainer.tools.diagnostics.diagnose import Diagnosis
    from trainer.tools.report.run_summary import Excess, SeedGroup, SummaryRow
    from trainer.tools.runs.load import RunRecord

# By importance; of a narrow terminal the last are left out first.
LOSSES = ("Held-out loss", "Final loss", "Best held-out loss", "Best loss")
IF_ANY = ("Cold starts", "False evictions", "Rejected steps", "Restarts")
FIRST_METRIC, FIRST_SETTING = 50, 10


def compare(
    paths: RunsArgument,
    last: Annotated[
        int | None, typer.Option(min=1, help="Number of final rows to average (default: the last tenth, at most 20).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: two key by key; more as a table, where runs that differ in the seed alone are one row."""
    from trainer.tools.diagnostics.diagnose import diagnose
    from trainer.tools.report.run_summary import reservations, seed_groups, with_distinct_names
    from trainer.tools.runs.load import load_run

    if len(paths) < 2:
        raise UserError("train compare", "needs at least two runs, got one", "train compare RUN_DIR RUN_DIR")
    diagnoses = [diagnose(run) for run in with_distinct_names([load_run(path) for path in paths])]
    label, groups = seed_groups(diagnoses, window=last)
    if len(paths) == 2:
        remarks = list(reservations(groups, None))
        if as_json:
            print_json({**_two_as_json(diagnoses, last), "reservations": remarks})
            return
        runs = [diagnosis.run for diagnosis in diagnoses]
        for table in (_config_table(runs), _outcome_table(diagnoses, last), _means_table(runs, last)):
            output().print(table)
    else:
        remarks = list(reservations(groups, label))
        if as_json:
            rows = [_group_as_json(*row) for row in zip(groups, _excesses(label, groups), strict=True)]
            print_json({"ranked_by": label, "window": last, "groups": rows, "reservations": remarks})
            return
        _print_groups(label, groups)
    notes = [f"{diagnosis.run.name}: {note}" for diagnosis in diagnoses for note in diagnosis.run.notes]
    for text in [*remarks, *notes]:
        output().print(Text(text, style=COLOURS["warning"]))


def _run_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    found = {"verdict": diagnosis.verdict, "findings": [ruling.rule.name for ruling in diagnosis.findings]}
    return {"name": diagnosis.run.name, "path": str(diagnosis.run.path), **found, "notes": diagnosis.run.notes}


def _two_as_json(diagnoses: Sequence[Diagnosis], window: int | None) -> dict[str, Any]:
    from trainer.tools.report.run_summary import config_differences, end_of, key_means, summarize

    runs = [diagnosis.run for diagnosis in diagnoses]
    outcomes = zip(*(summarize(run, window=window) for run in runs), strict=True)
    return {
        "runs": [_run_as_json(diagnosis) for diagnosis in diagnoses],
        "config": [{"key": key, "values": values} for key, values in config_differences(runs)],
        "outcome": [
            {"label": a.label, "unit": a.unit, "values": [a.value, b.value], "notes": [a.note, b.note]}
            for a, b in outcomes
        ],
        "window": window,
        "ends": [asdict(end_of(run, window)) for run in runs],
        "metrics": [asdict(row) for row in key_means(runs[0], runs[1], window=window)],
    }


def _new_table(title: str, first: str, runs: Sequence[RunRecord], *more: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="", box=SIMPLE_HEAD, pad_edge=False
    )
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
    from trainer.tools.report.run_summary import summaries

    runs = [diagnosis.run for diagnosis in diagnoses]
    table = _new_table("Outcome", "", runs, "difference")
    for first, second in summaries(runs, window):
        difference = ""
        if isinstance(first.value, float) and isinstance(second.value, float):
            difference = _signed(second.value - first.value)
        table.add_row(first.heading, _fact_cell(first), _fact_cell(second), difference)
    style = {"healthy": COLOURS["healthy"], "findings": COLOURS["warning"]}
    briefs = [Text(d.brief.replace(", ", "\n"), style=style.get(str(d.verdict), "dim")) for d in diagnoses]
    table.add_row("Verdict", *briefs, "")
    return table


def _fact_cell(fact: SummaryRow) -> Text:
    """The value; of a loss with what it covers, and a missing one with the reason. Other notes are on the report's page."""
    has_note = fact.note and (fact.unit == "nats/token" or fact.value is None)
    return Text.assemble(fact.text, (f"\n({fact.note})" if has_note else "", "dim"))


def _means_table(runs: Sequence[RunRecord], window: int | None) -> Table:
    """Keys that differ; bold where the difference exceeds both standard deviations together, which single values lack."""
    from trainer.tools.report.run_summary import end_of, key_means

    means = key_means(runs[0], runs[1], window=window)

    title = "Final mean (the last value of lr, counters and running averages)\n"
    title += "\n".join(f"{run.name}: {end_of(run, window)}" for run in runs)
    table = _new_table(title, "key", runs, "difference", "in %")
    differing = [row for row in means if row.difference != 0]
    for row in differing:
        scatter = [deviation for deviation in row.standard_deviations if deviation is not None]
        is_large = bool(scatter) and row.difference is not None and abs(row.difference) > sum(scatter)
        shown = [
            "–" if mean is None else number_text(mean) + (f" ± {number_text(deviation)}" if deviation else "")
            for mean, deviation in zip(row.means, row.standard_deviations, strict=True)
        ]
        relative = f"{100 * row.relative:+.1f}" if row.relative is not None else ""
        difference = _signed(row.difference) if row.difference is not None else ""
        table.add_row(Text(row.key), *map(Text, shown), difference, relative, style="bold" if is_large else "")
    if len(differing) < len(means):
        table.caption_justify = "left"
        table.caption = f"{len(means) - len(differing)} other keys have the same mean in both"
    return table


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{number_text(abs(value))}"


def _print_groups(label: str, groups: Sequence[SeedGroup]) -> None:
    """The table of rows with seeds grouped, ranked."""
    from trainer.tools.report.run_summary import ERRORS_WIDE

    columns = _columns(label, groups)
    title = (
        f"By {label.lower()}: mean ± standard deviation over seeds (n - 1).\n"
        f"Above the best: ± standard error of the difference; within {ERRORS_WIDE:g} of them it may be chance"
    )
    console = output(needed_width=needed_width(columns))
    table = fitted_table(columns, width=console.width, hint="; --json has all", title=title, title_justify="left")
    console.print(table, highlight=False)


def _columns(label: str, groups: Sequence[SeedGroup]) -> list[Column]:
    from trainer.tools.report.run_summary import value_text

    labels = [label, *(name for name in LOSSES if name != label), "Batch", "Fill", "Speed", "Noise scale", *IF_ANY]
    settings = [
        Column(
            escape(key).replace(".", ".\n"),
            [escape(value_text(group.settings[key])) for group in groups],
            leave_out=FIRST_SETTING + place,
        )
        for place, key in enumerate(groups[0].settings)
    ]
    units = {name: next((group.units[name] for group in groups if group.units.get(name)), "") for name in labels}
    metrics = [
        Column(
            "\n".join(filter(None, (name.replace(" loss", "\nloss"), units[name]))),
            [_spread_text(group, name) for group in groups],
            "right",
            leave_out=0 if name == label else FIRST_METRIC + place,
        )
        for place, name in enumerate(labels)
        if any(name in group.outcome and (name not in IF_ANY or group.outcome[name].mean) for group in groups)
    ]
    above = [_excess_text(found) for found in _excesses(label, groups)]
    num_faulty = [sum(bool(diagnosis.findings) for diagnosis in group.diagnoses) for group in groups]
    verdicts = [f"{found} of {len(group.runs)} with findings" for found, group in zip(num_faulty, groups, strict=True)]
    return [
        Column("row", [str(number) for number in range(1, len(groups) + 1)], "right"),
        *settings,
        Column("seeds", [str(len(group.seeds)) for group in groups], "right"),
        *metrics[:1],
        Column("above\nthe best", above, "right"),
        Column("steps", [_range(group, "Steps") for group in groups], "right", leave_out=FIRST_METRIC),
        Column("tokens", [_range(group, "Tokens seen") for group in groups], "right", leave_out=FIRST_METRIC + 20),
        *metrics[1:],
        Column("verdict", verdicts, leave_out=FIRST_METRIC + 21),
        Column("runs", [escape(few([run.name for run in group.runs])) for group in groups], leave_out=9, wraps=True),
    ]


def _excesses(label: str, groups: Sequence[SeedGroup]) -> list[Excess | None]:
    """Of each row against the first; None for the first, and where either has no value."""
    from trainer.tools.report.run_summary import excess

    best = groups[0].outcome.get(label)
    rest = (group.outcome.get(label) for group in groups[1:])
    return [None, *(None if best is None or each is None else excess(best, each) for each in rest)]


def _spread_text(group: SeedGroup, name: str) -> str:
    if (spread := group.outcome.get(name)) is None:
        return "–"
    around = "" if spread.deviation is None else f" ± {number_text(spread.deviation, 2)}"
    return number_text(spread.mean, 5) + around + (f" (n = {spread.n})" if spread.n < len(group.seeds) else "")


def _excess_text(found: Excess | None) -> str:
    if found is None:
        return ""
    difference = f"+{number_text(found.difference, 3)}"
    if found.error is None:
        return f"{difference}\nno error bar"
    return f"{difference} ± {number_text(found.error, 2)}" + ("" if found.is_resolved else "\nmay be chance")


def _range(group: SeedGroup, label: str) -> str:
    """The value of all runs, or the lowest and highest."""
    ends = group.values(label)
    return " to ".join(dict.fromkeys(f"{end:,.0f}" for end in (min(ends), max(ends)))) if ends else "–"


def _group_as_json(group: SeedGroup, found: Excess | None) -> dict[str, Any]:
    """Everything that the table shows, and what it leaves out to fit."""
    return {
        "settings": dict(group.settings),
        "seeds": len(group.seeds),
        "runs": [{**_run_as_json(each), "seed": each.run.setting("run.seed")} for each in group.diagnoses],
        "outcome": [
            {"label": name, "unit": group.units[name], "mean": of.mean, "standard_deviation": of.deviation, "n": of.n}
            for name, of in group.outcome.items()
        ],
        "above_best": None if found is None else asdict(found),
    }
