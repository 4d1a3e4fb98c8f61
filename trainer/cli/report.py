"""`train report`: one self-contained page about a run, or about several overlaid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from trainer.diagnostics.diagnose import diagnose
from trainer.errors import UserError
from trainer.report.names import with_distinct_names
from trainer.report.page import plotly_script, render_page
from trainer.runs.load import load_run


def write_report(paths: Sequence[str], out: str, *, force: bool) -> None:
    """Read the runs, diagnose each, and write the page; says on stderr what is in it.

    Raises:
        UserError: `out` exists (unless `force`), a path is no run, plotly is not installed, or the page cannot be written.
    """
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError("--out", f"must end in .html, got {out}", "--out report.html")
    if target.exists() and not force:
        raise UserError(out, "exists already", "name another file, or add --force")
    plotly = plotly_script()
    diagnoses = [diagnose(run) for run in with_distinct_names([load_run(path) for path in paths])]
    page = render_page(diagnoses, plotly=plotly).encode("utf-8")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(page)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError("--out", f"{out} cannot be written: {error.strerror}", "choose another place") from None
    for diagnosis in diagnoses:
        run = diagnosis.run
        typer.echo(f"{run.name}: {len(run.steps):,} logged steps. {diagnosis.summary}", err=True)
        for note in run.notes:
            typer.echo(f"{run.name}: note: {note}", err=True)
    typer.echo(f"the report is in {out} ({len(page) / 1e6:.1f} MB)", err=True)
