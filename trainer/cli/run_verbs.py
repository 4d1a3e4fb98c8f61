"""The verbs that look at a run: `train diagnose | report | compare | checkpoint ... | payload ...`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()
payload_app = typer.Typer(help="Metrics payloads, as another program would read them.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)


@app.command("diagnose")
def diagnose_run(
    run_dir: Annotated[str, typer.Argument(help="A run's directory, or a metrics.jsonl.", metavar="RUN_DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for faults in what a run has logged. Exit code 0: healthy, 3: something was found."""
    from trainer.cli.diagnose import run_diagnose

    run_diagnose(run_dir, as_json=as_json)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")],
    out: Annotated[str, typer.Option(help="The page.", metavar="X.HTML")] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace a page that is there.")] = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several overlaid."""
    from trainer.cli.report import write_report

    write_report(runs, out, force=force)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="Run directory, or metrics.jsonl.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The other one.", metavar="B")],
    last: Annotated[
        int | None, typer.Option(min=1, help="Logged rows that are averaged at the end [the last tenth, 20 at most].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How two runs differ: settings, outcome, and every key at the end."""
    from trainer.cli.compare import compare_runs

    compare_runs(first, second, window=last, as_json=as_json)


RunDirArgument = Annotated[str, typer.Argument(help="Directory of the run.", metavar="RUN_DIR")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint_app.command("list")
def list_(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """What a run can go on from, newest first."""
    from trainer.cli.checkpoint import list_checkpoints

    list_checkpoints(run_dir, as_json=as_json)


@checkpoint_app.command("verify")
def verify_checkpoint(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Compare every file of every checkpoint with its hash; exit with 2 if one is not whole."""
    from trainer.cli.checkpoint import verify_checkpoints

    verify_checkpoints(run_dir, as_json=as_json)


@payload_app.command()
def validate(
    file: Annotated[str, typer.Argument(help="A metrics.jsonl or captured stdout; - for stdin.")],
    count_all: Annotated[bool, typer.Option("--all", help="Go on after the first violation, and count them.")] = False,
) -> None:
    """Check that every line is a payload of a schema version that is understood."""
    from trainer.cli.payload import validate_file

    validate_file(file, count_all=count_all)
