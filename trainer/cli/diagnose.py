"""`train diagnose`: the rules' answer for people and for programs."""

from __future__ import annotations

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.diagnostics.diagnose import Diagnosis, Ruling, diagnose
from trainer.diagnostics.outcome import Evidence
from trainer.errors import UserError
from trainer.runs.load import load_run
from trainer.runs.wording import number_text

EXIT_FINDINGS = 3
COLOURS = {"error": "red", "warning": "yellow", "advice": "cyan"}
SHOWN_STEPS = 4
PLAIN_WIDTH = 110


def run_diagnose(path: str, *, as_json: bool) -> None:
    """Print what the rules say of a run; exit with 3 if they found something.

    Raises:
        UserError: there is no run at `path`, or it has nothing that the rules could look at.
    """
    run = load_run(path)
    if not run.steps:
        raise UserError(path, "has no training rows, so there is nothing to diagnose", "wait for the first logged step")
    diagnosis = diagnose(run)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False))
    else:
        print_diagnosis(diagnosis, Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    if not diagnosis.is_healthy:
        raise typer.Exit(EXIT_FINDINGS)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Findings first, then one line for every rule."""
    steps = diagnosis.run.steps
    extent = f"{len(steps):,} rows, steps {steps[0]:,} to {steps[-1]:,}"
    console.print(f"{escape(str(diagnosis.run.path))}: {extent}", highlight=False)
    for note in diagnosis.run.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for ruling in [*diagnosis.findings, *diagnosis.advice]:
        _print_finding(ruling, console)
    console.print(_table(diagnosis))
    console.print(_verdict(diagnosis), highlight=False)


def _print_finding(ruling: Ruling, console: Console) -> None:
    assert ruling.severity is not None
    colour = COLOURS[ruling.severity]
    console.print(
        f"[{colour}]{ruling.severity}[/] [bold]{ruling.rule.name}[/]: {escape(ruling.outcome.sentence)}",
        highlight=False,
    )
    for evidence in ruling.outcome.evidence:
        console.print(f"    {escape(_evidence_line(evidence))}", highlight=False)
    if ruling.outcome.knob is not None:
        console.print(f"    try {escape(str(ruling.outcome.knob))}", highlight=False)


def _evidence_line(evidence: Evidence) -> str:
    pairs = list(zip(evidence.steps, evidence.values, strict=True))
    shown = ", ".join(f"step {step}: {number_text(value)}" for step, value in pairs[:SHOWN_STEPS])
    return f"{evidence.key}: {shown}{', ...' if len(pairs) > SHOWN_STEPS else ''}"


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rule", "verdict", "what was seen"):
        table.add_column(heading, overflow="fold")
    for ruling in diagnosis.rulings:
        verdict = ruling.outcome.verdict.replace("_", " ")
        if ruling.severity is not None:
            verdict = f"[{COLOURS[ruling.severity]}]{ruling.severity}[/]"
        table.add_row(ruling.rule.name, verdict, escape(ruling.outcome.sentence))
    return table


def _verdict(diagnosis: Diagnosis) -> str:
    unmeasured = sum(ruling.outcome.verdict == "not_measured" for ruling in diagnosis.rulings)
    tail = f"; {unmeasured} of {len(diagnosis.rulings)} rules had nothing to measure" if unmeasured else ""
    if diagnosis.is_healthy:
        return f"[green]healthy[/]{tail}"
    names = ", ".join(ruling.rule.name for ruling in diagnosis.findings)
    return f"[red]findings[/]: {names}{tail}"
