"""`train --config x.toml`: from the command line to a finished run."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from trainer.cli.launch import launch_ranks, report_exit_code, without_nproc
from trainer.config.load import load_config
from trainer.training.signals import StopRequest, say_stopping


def run_training(config_path: str, overrides: list[str], *, run_dir: str | None, nproc: int | None) -> None:
    """Train, on this rank, or start ranks that do.

    Raises:
        UserError: the config, the data or the launch are not right.
        typer.Exit: with the run's exit code.
    """
    config = load_config(config_path, overrides)
    if nproc is not None:
        raise typer.Exit(launch_ranks(nproc, without_nproc(sys.argv[1:])))
    # Before torch is loaded, so that a stop that comes meanwhile is a stop, and no death.
    stop = StopRequest(say_stopping)
    stop.install()
    from trainer.cli.live_verdict import LiveVerdict
    from trainer.training.main import train

    code = train(config, Path(config_path), run_dir, stop=stop, verdict_of=LiveVerdict)
    report_exit_code(code)
    raise typer.Exit(code)
