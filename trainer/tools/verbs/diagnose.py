"""`train diagnose`: the rules' findings on a run, for people and for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.cli.options import JsonOption, RunArgument
from trainer.cli.terminal import coloured, echo, output
from trainer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainer.tools.diagnostics.diagnose import Diagnosis, Ruling
    from trainer.tools.diagnostics.rule import Evidence

EXIT_FINDINGS = 3
SHOWN_STEPS = 4


def diagnose(
    run_dir: RunArgument,
    show_all: Annotated[
        bool, typer.Option("--all", help="Say what each rule without anything to measure needs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Look for faults in a run's logged metrics. Exit code 0: none in what could be judged, 3: findings."""
    from trainer.tools.diagnostics.diagnose import diagnose as apply_rules
    from trainer.tools.runs.load import load_run

    run = load_run(run_dir)
    if not run.steps:
        raise UserError(
            run_dir, "has no training rows, so there is nothing to diagnose", "wait for the first logged step"
        )
    diagnosis = apply_rules(run)
    if as_json:
        echo(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False))
    else:
        _print_diagnosis(diagnosis, output(), shows_all=show_all)
    if diagnosis.findings:
        raise typer.Exit(EXIT_FINDINGS)


def _print_diagnosis(diagnosis: Diagnosis, console: Console, *, shows_all: bool) -> None:
    """Findings first, then one line per rule; unless all are shown, one for those that had nothing to measure."""
    steps = diagnosis.run.steps
    extent = f"{len(steps):,} rows, steps {steps[0]:,} to {steps[-1]:,}"
    console.print(f"{escape(str(diagnosis.run.path))}: {extent}", highlight=False)
    for note in diagnosis.run.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for ruling in [*diagnosis.findings, *diagnosis.advice]:
        for line in _finding_lines(ruling):
            console.print(line, highlight=False)
    unmeasured = [] if shows_all else [ruling for ruling in diagnosis.rulings if ruling.had_nothing_to_measure]
    console.print(_rule_table(ruling for ruling in diagnosis.rulings if shows_all or not ruling.had_nothing_to_measure))
    if unmeasured:
        names = ", ".join(ruling.rule.name for ruling in unmeasured)
        console.print(f"nothing to measure: {names}; train diagnose --all says what each needs", highlight=False)
    console.print(_summary(diagnosis), highlight=False)


def _finding_lines(ruling: Ruling) -> list[str]:
    assert ruling.severity is not None
    outcome = ruling.outcome
    lines = [f"{coloured(ruling.severity)} [bold]{ruling.rule.name}[/]: {escape(outcome.sentence)}"]
    lines += [f"    {escape(_evidence_line(evidence))}" for evidence in outcome.evidence]
    if ruling.fix:
        lines.append(f"    {escape(ruling.fix)}")
    return lines


def _evidence_line(evidence: Evidence) -> str:
    from trainer.wording import number_text

    pairs = list(zip(evidence.steps, evidence.values, strict=True))
    shown = ", ".join(f"step {step}: {number_text(value)}" for step, value in pairs[:SHOWN_STEPS])
    return f"{evidence.key}: {shown}{', ...' if len(pairs) > SHOWN_STEPS else ''}"


def _rule_table(rulings: Iterable[Ruling]) -> Table:
    """Rules that judged the run, then those that could not, with what they need."""
    table = Table(box=None, pad_edge=False)
    for heading in ("rule", "verdict", "observation"):
        table.add_column(heading, overflow="fold")
    for ruling in sorted(rulings, key=lambda ruling: not ruling.is_judged):
        shown = ruling.result if ruling.severity is None else coloured(ruling.severity)
        table.add_row(ruling.rule.name, shown, escape(ruling.outcome.sentence))
    return table


def _summary(diagnosis: Diagnosis) -> str:
    if diagnosis.verdict == "no_findings":
        return f"nothing wrong in what was measured: {diagnosis.coverage}"
    names = f": {diagnosis.brief}" if diagnosis.findings else ""
    return f"{coloured(str(diagnosis.verdict))}{names}; {diagnosis.coverage}"
