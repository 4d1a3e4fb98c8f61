"""`train report`: one self-contained page about a run, or about several overlaid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.errors import UserError
from trainer.files import write_file


def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")],
    out: Annotated[str, typer.Option(help="HTML file to write.", metavar="X.HTML")] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several overlaid."""
    from trainer.diagnostics.diagnose import diagnose
    from trainer.report.names import with_distinct_names
    from trainer.report.page import plotly_script, render_page
    from trainer.runs.load import load_run

    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError("--out", f"must end in .html, got {out}", "--out report.html")
    if target.exists() and not force:
        raise UserError(out, "exists already", "name another file, or add --force")
    plotly = plotly_script()
    diagnoses = [diagnose(run) for run in with_distinct_names([load_run(path) for path in runs])]
    text = render_page(diagnoses, plotly=plotly)
    page = text.encode("utf-8", "backslashreplace")  # names of files may hold any bytes
    _write_atomically(target, page)
    for diagnosis in diagnoses:
        run = diagnosis.run
        typer.echo(f"{run.name}: {len(run.steps):,} logged steps. {diagnosis.summary}", err=True)
        for note in run.notes:
            typer.echo(f"{run.name}: note: {note}", err=True)
    typer.echo(f"wrote the report to {out} ({len(page) / 1e6:.1f} MB)", err=True)


def _write_atomically(target: Path, page: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, page)
    except OSError as error:
        raise UserError("--out", f"{target} cannot be written: {error.strerror}", "choose another path") from None
