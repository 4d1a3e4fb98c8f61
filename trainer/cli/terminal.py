"""Output for people: the console and its width, colours, counts, a progress bar."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from trainer.errors import UserError
from trainer.files import write_file
from trainer.wording import printable_lines

PIPE_WIDTH = 120  # characters of a line where stdout is no terminal
COLOURS = {
    "error": "red", "warning": "yellow", "advice": "cyan",
    "healthy": "green", "findings": "red",
    "running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "died": "red", "unknown": "dim",
}  # fmt: skip


class _Console(Console):
    """Escapes what is in the texts that it shows, which come from anywhere; colours are not in texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The pieces of a renderable."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=printable_lines(piece.text))


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may hold names of any file: nothing but its line breaks acts on the terminal."""
    typer.echo(printable_lines(text), err=err, nl=nl)


def output(*, needed_width: int = 0) -> Console:
    """Stdout, as wide as the terminal; in a pipe as `COLUMNS` says, else `PIPE_WIDTH`, or `needed_width` if that is more."""
    columns = os.environ.get("COLUMNS", "")
    is_told = sys.stdout.isatty() or (columns.isdecimal() and int(columns) > 0)  # by the terminal or by COLUMNS
    if not is_told:
        return _Console(file=sys.stdout, width=max(PIPE_WIDTH, needed_width))
    return _Console(file=sys.stdout, width=None if sys.stdout.isatty() else int(columns))


def coloured(word: str, text: str | None = None, *, otherwise: str = "yellow") -> str:
    """rich markup: the word, or `text` instead, in the word's colour."""
    return f"[{COLOURS.get(word, otherwise)}]{escape(word if text is None else text)}[/]"


def print_json(content: Any) -> None:
    """Print JSON; what it has no type for (a date of a config) as text."""
    echo(json.dumps(content, indent=2, default=str))


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Errors of the operating system in the block become a `UserError`, of `where` unless they name a file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        name = str(error.filename2 or error.filename or where)
        verb, fix = ("written", "make room, and run it again") if is_full else ("used", "check the path and its mode")
        # Of a directory that was to be made: something else has its name.
        reason = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror or error
        raise UserError(where if name.endswith(".tmp") else name, f"cannot be {verb} ({reason})", fix) from None


def refuse_existing(out: str, *, force: bool) -> None:
    """Refuse to replace a file or directory without `--force`."""
    if Path(out).exists() and not force:
        raise UserError(out, "exists already", "name another file, or add --force")


def put_text(text: str, out: str | None) -> None:
    """Write to a file, or to stdout.

    Raises:
        UserError: the file cannot be written.
    """
    if out is None:
        echo(text, nl=False)
        return
    with writing(out):
        write_file(Path(out), text, follow=True)
    echo(f"wrote {out}", err=True)


EXIT_USER_ERROR = 2
# A rank that has not answered by then is not waited for; those that have still agree on one speaker.
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
        meeting = _Meeting(0.0 if is_told_to_end else WAIT_FOR_RANKS_SEC)
        speaker, is_waiting = meeting.speaker(), meeting.is_alive()
    # As soon as one rank has exited, torchrun ends the others. That must swallow neither the message nor the exit code.
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if message and (speaker is None or str(speaker) == rank):
        prefix = "" if rank == "0" else f"[rank {rank}] "
        print(prefix + printable_lines(message), file=sys.stderr, flush=True)  # noqa: T201 - the one message of a refused run
    if is_waiting:  # C++ code in another thread may abort the process while the interpreter shuts down
        sys.stdout.flush()
        os._exit(EXIT_USER_ERROR)
    sys.exit(EXIT_USER_ERROR)


class _Meeting(threading.Thread):
    """Answers the other ranks that this one refuses. A thread, since it may block for long and signals must be handled."""

    def __init__(self, wait_sec: float) -> None:
        super().__init__(name="meeting", daemon=True)
        self._end = time.monotonic() + wait_sec
        self._speaker: int | None = None

    def speaker(self) -> int | None:
        """The rank that prints; None if the others cannot be reached. Waits for them, but not after a SIGTERM."""
        signal.signal(signal.SIGTERM, self._end_wait)
        self.start()
        while self.is_alive() and time.monotonic() < self._end + AGREE_SEC:
            self.join(0.1)
        return self._speaker

    def _end_wait(self, number: int, frame: FrameType | None) -> None:
        """A rank has failed, and torchrun ends the others: who has not answered by now never will."""
        self._end = min(self._end, time.monotonic())

    def run(self) -> None:
        """Meet the others, if there is a launcher and the host of its store lives."""
        import torch.distributed as dist

        from trainer.distributed.env import answer_refusal, rank_info, rendezvous_store
        from trainer.errors import UserError

        with suppress(UserError, ValueError, RuntimeError, dist.DistError):
            info = rank_info()
            store = rendezvous_store(info, timeout=timedelta(seconds=WAIT_FOR_RANKS_SEC))
            self._speaker = answer_refusal(store, rank=info.rank, world_size=info.world_size, gives_up=self._is_over)

    def _is_over(self) -> bool:
        return time.monotonic() > self._end
