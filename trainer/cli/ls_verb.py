"""`train ls`: all runs at a glance."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command("ls")
def list_runs(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Directories of runs, or runs [runs].", metavar="DIR...")
    ] = None,
    diagnose: Annotated[bool, typer.Option(help="Say what train diagnose finds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List runs: state, step, loss, age and verdict, the newest last."""
    import time

    from trainer.cli import runs_list

    runs_list.list_runs(paths or ["runs"], now=time.time(), as_json=as_json, diagnoses=diagnose)
