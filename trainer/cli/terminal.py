"""Shared by all verbs: options, the import of torch, text on a terminal, and refusals."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, NoReturn

import typer

from trainer.errors import UserError
from trainer.wording import printable_lines

_config = typer.Option("--config", "-c", help="TOML config of the run.", metavar="X.TOML")
ConfigOption = Annotated[str | None, _config]
_set = typer.Option("--set", help="Override a config value; repeatable.", metavar="TABLE.KEY=VALUE")
SetOption = Annotated[list[str] | None, _set]


def require_config(config: str | None, command: str) -> str:
    """The path that was given. Raises UserError if none was."""
    if config is None:
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
# A rank that has not answered by then is not waited for.
WAIT_FOR_RANKS_SEC = 60.0
# For that agreement once the wait is over. torchrun kills a rank 30 s after its SIGTERM.
AGREE_SEC = 20.0


def refuse(message: str, *, speaker: int | None = None, is_told_to_end: bool = False) -> NoReturn:
    """Print the message, once for all ranks, and exit with the code for users' mistakes.

    Args:
        message: empty if nothing is to be printed.
        speaker: the rank that prints, if the ranks have agreed on one. If not, they do so now.
        is_told_to_end: this process has got a SIGTERM already.
    """
    rank = os.environ.get("RANK", "0")
    is_waiting = False
    if message and speaker is None and os.environ.get("WORLD_SIZE", "1") != "1":
        speaker, is_waiting = _meet_ranks(message, 0.0 if is_told_to_end else WAIT_FOR_RANKS_SEC)
    # As soon as one rank has exited, torchrun ends the others. That must swallow neither the
    # message nor the exit code.
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if message and (speaker is None or str(speaker) == rank):
        prefix = "" if rank == "0" else f"[rank {rank}] "
        print(prefix + printable_lines(message), file=sys.stderr, flush=True)  # noqa: T201
    if is_waiting:
        # C++ code in another thread may abort the process while the interpreter shuts down.
        sys.stdout.flush()
        os._exit(EXIT_USER_ERROR)
    sys.exit(EXIT_USER_ERROR)


def _meet_ranks(message: str, wait_sec: float) -> tuple[int | None, bool]:
    """Tell the other ranks that this one refuses.

    Returns:
        The rank that prints, None if the others cannot be reached; whether a thread still waits.
    """
    end = time.monotonic() + wait_sec
    speakers: list[int] = []

    def stop_waiting(*_: object) -> None:  # torchrun ends ranks after a failure: who is silent stays so
        nonlocal end
        end = min(end, time.monotonic())

    def meet() -> None:
        import torch.distributed as dist

        from trainer.distributed.env import answer_refusal, rank_info, rendezvous_store

        # No launcher, or the host of its store is gone.
        with suppress(UserError, ValueError, RuntimeError, dist.DistError):
            info = rank_info()
            store = rendezvous_store(info, timeout=timedelta(seconds=WAIT_FOR_RANKS_SEC))
            ranks = {"rank": info.rank, "world_size": info.world_size}
            speakers.append(answer_refusal(store, message, **ranks, gives_up=lambda: time.monotonic() > end))

    # A thread, since it may block for long and signals must be handled.
    thread = threading.Thread(target=meet, name="meeting", daemon=True)
    signal.signal(signal.SIGTERM, stop_waiting)
    thread.start()
    while thread.is_alive() and time.monotonic() < end + AGREE_SEC:
        thread.join(0.1)
    return next(iter(speakers), None), thread.is_alive()
