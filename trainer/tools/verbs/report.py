"""`train report`: one self-contained page about a run, or about several overlaid; written, or served while they go on."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.cli.terminal import echo
from trainer.errors import UserError

DEFAULT_OUT = "report.html"


def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")],
    out: Annotated[
        str | None, typer.Option(help=f"HTML file to write (default: {DEFAULT_OUT}).", metavar="X.HTML")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Serve a page that updates itself, for browsers on this machine, until Ctrl-C."),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --follow: port to serve on (default: a free one).")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run, or about several overlaid."""
    if follow:
        if out is not None or force:
            raise UserError(
                "--out" if out is not None else "--force", "--follow writes no file", "leave one of them out"
            )
        _follow(runs, port or 0)
        return
    if port is not None:
        raise UserError("--port", "without --follow, nothing is served", "add --follow")
    _write(runs, DEFAULT_OUT if out is None else out, force=force)


def _write(runs: list[str], out: str, *, force: bool) -> None:
    from trainer.tools.diagnostics.diagnose import diagnose
    from trainer.tools.pictures import check_page, plotly_script, write_page
    from trainer.tools.report.page import render_page, render_parts
    from trainer.tools.report.run_summary import with_distinct_names
    from trainer.tools.runs.load import load_run

    target = check_page(out)
    if target.exists() and not force:
        raise UserError(out, "exists already", "name another file, or add --force")
    plotly = plotly_script()
    diagnoses = [diagnose(run) for run in with_distinct_names([load_run(path) for path in runs])]
    names = [diagnosis.run.name for diagnosis in diagnoses]
    size = write_page(render_page(names, render_parts(diagnoses), plotly=plotly), target)
    for diagnosis in diagnoses:
        run = diagnosis.run
        echo(f"{run.name}: {len(run.steps):,} logged steps. {diagnosis.summary}", err=True)
        for note in run.notes:
            echo(f"{run.name}: note: {note}", err=True)
    echo(f"wrote the report to {out} ({size / 1e6:.1f} MB)", err=True)


def _follow(runs: list[str], port: int) -> None:
    from trainer.tools.pictures import plotly_script
    from trainer.tools.report.live import serve

    serve(runs, plotly=plotly_script(), port=port, say=lambda words: echo(words, err=True))
