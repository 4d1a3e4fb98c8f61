"""Shared by all verbs: options, the import of torch, text on a terminal, and refusals."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from trainer.errors import UserError
from trainer.wording import printable_lines

_config = typer.Option("--config", "-c", help="TOML config of the run.", metavar="X.TOML")
ConfigOption = Annotated[str | None, _config]
_set = typer.Option("--set", help="Override a config value; repeatable.", metavar="TABLE.KEY=VALUE")
SetOption = Annotated[list[str] | None, _set]


def require_config(config: str | None, command: str) -> str:
    """The path that was given. Raises UserError if none was, or an empty one."""
    if not config:
        raise UserError("--config", "is required", f"{command} --config train_configs/smoke.toml")
    return config


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collections, and leave the imported objects out of all later ones."""
    # Some 20 % of the time that importing torch takes, and most of that of each later collection.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of any origin: only its line breaks act on the terminal."""
    typer.echo(printable_lines(text), err=err, nl=nl)


EXIT_USER_ERROR = 2
WAIT_FOR_RANK_0_SEC = 5.0


def refuse(message: str, *, speaker: int | None = None, is_told_to_end: bool = False) -> NoReturn:
    """Print the message, once for all ranks, and exit with the code for users' mistakes.

    Args:
        message: empty if nothing is to be printed.
        speaker: the rank that prints, if the ranks have agreed on one.
        is_told_to_end: this process has got a signal to stop already.
    """
    rank = os.environ.get("RANK", "0")
    if "RANK" in os.environ:
        # As a rule rank 0 has made the same mistake: it prints, and its launcher ends the others.
        waits = speaker is None and rank != "0"
        signal.signal(signal.SIGTERM, lambda *_: waits and sys.exit(EXIT_USER_ERROR))
        if waits and is_told_to_end:
            sys.exit(EXIT_USER_ERROR)
        time.sleep(WAIT_FOR_RANK_0_SEC * waits)
    if message and (speaker is None or str(speaker) == rank):
        prefix = "" if rank == "0" else f"[rank {rank}] "
        print(prefix + printable_lines(message), file=sys.stderr, flush=True)  # noqa: T201
    sys.exit(EXIT_USER_ERROR)
