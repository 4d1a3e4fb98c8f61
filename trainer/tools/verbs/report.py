"""`train report`: one self-contained page about a run, or about several overlaid; written, or served while they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.terminal import echo
from trainer.errors import UserError
from trainer.files import write_file

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
    from trainer.tools.report.names import with_distinct_names
    from trainer.tools.report.page import plotly_script, render_page
    from trainer.tools.runs.load import load_run

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
        echo(f"{run.name}: {len(run.steps):,} logged steps. {diagnosis.summary}", err=True)
        for note in run.notes:
            echo(f"{run.name}: note: {note}", err=True)
    echo(f"wrote the report to {out} ({len(page) / 1e6:.1f} MB)", err=True)


def _write_atomically(target: Path, page: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, page, follow=True)
    except OSError as error:
        raise UserError("--out", f"{target} cannot be written: {error.strerror}", "choose another path") from None


def _follow(runs: list[str], port: int) -> None:
    from trainer.tools.report.follow import Follower
    from trainer.tools.report.page import plotly_script
    from trainer.tools.report.serve import ReportServer, yield_to_the_run

    plotly = plotly_script()
    follower = Follower(runs)
    with ReportServer(follower, plotly=plotly, port=port) as server:
        yield_to_the_run()
        try:
            echo(f"following {', '.join(follower.names)} at {server.url} (end with Ctrl-C)", err=True)
            server.serve_forever()
        except KeyboardInterrupt:
            echo("no longer following", err=True)
