"""Output for people: the console and its width, colours, counts, a progress bar."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """Errors of the operating system in the block are the user's, of `where` unless they name a file.

    Raises:
        UserError: see above.
    """
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
    """Refuse to replace a file or directory without `--force`.

    Raises:
        UserError: it exists.
    """
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
