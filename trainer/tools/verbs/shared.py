"""Shared by several verbs: options and arguments, the console and its colours, and files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from typer import Argument, BadParameter, Option

from trainer.cli.terminal import echo
from trainer.errors import UserError
from trainer.files import parse_count, write_file
from trainer.wording import printable_lines

TRUST_HELP = "Import the code that the run's config names: your own, or of somebody you trust."
FORMAT_HELP = "auto (by file extension), a format's name, or package.module:function."
TextOption = Annotated[bool, Option("--text", help="The text of the rows too.")]
ForceOption = Annotated[bool, Option("--force", help="Replace what exists.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]
TrustOption = Annotated[bool, Option("--trust-code", help=TRUST_HELP)]
RunDirArgument = Annotated[str, Argument(help="A run directory.", metavar="RUN_DIR")]
RunArgument = Annotated[str, Argument(help="A run directory, or a metrics.jsonl.", metavar="RUN_DIR")]
RunsArgument = Annotated[list[str], Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")]
STEP_HELP = "Step of the checkpoint; best: that of checkpoint.keep_best; default: the latest."
_STEP = Option("--step", metavar="N|best", help=STEP_HELP, parser=lambda at: parse_count(at) or at)
StepOption = Annotated[Any, _STEP]
EmaOption = Annotated[bool, Option("--ema", help="The averaged weights of a run with train.ema.")]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], Option(help="Where the model is.")]
FormatOption = Annotated[str, Option(help=FORMAT_HELP, metavar="NAME")]
ColumnOption = Annotated[str | None, Option(help="As data.source.column, of .jsonl and .parquet.", metavar="NAME")]
EodOption = Annotated[int | None, Option(help="Id that ends a document in .npy and headerless .bin files.")]
PIPE_WIDTH = 10_000  # characters of a line where stdout is no terminal
COLOURS = {
    "error": "red", "warning": "yellow", "advice": "cyan",
    "healthy": "green", "findings": "red", "held": "green", "broken": "red",
    "running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "died": "red", "unknown": "dim",
}  # fmt: skip


def require_run(run_dir: str) -> Path:
    """The directory, looked at before torch is imported. Raises UserError: there is none."""
    if not os.path.isdir(run_dir):
        fix = "name the directory of a run that has saved a checkpoint (runs/<name>-<time>)"
        raise UserError(run_dir, "is not a directory", fix)
    return Path(run_dir)


class _Console(Console):
    """Escapes what is in the texts that it shows, which come from anywhere."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The pieces of a renderable."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=printable_lines(piece.text))


def output() -> Console:
    """Stdout, as wide as `COLUMNS` or the terminal; in a pipe lines are not folded."""
    return _Console(file=sys.stdout, width=shutil.get_terminal_size((PIPE_WIDTH, 0)).columns)


def print_table(columns: Mapping[str, Sequence[str]], *, right: Collection[str] = (), **options: Any) -> None:
    """Print columns of rich markup by their headings; what is too wide for the terminal is folded.
    `right`: headings of those aligned at the right. `options`: of `rich.table.Table`."""
    table = Table(title_justify="left", **options)
    for heading in columns:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    output().print(table, highlight=False)


def coloured(word: str, text: str | None = None, *, otherwise: str = "yellow") -> str:
    """rich markup: the word, or `text` instead, in the word's colour."""
    return f"[{COLOURS.get(word, otherwise)}]{escape(word if text is None else text)}[/]"


def print_json(content: Any) -> None:
    """Print strict JSON; what it has no type for (a date of a config, a NaN) as text."""
    from trainer.metrics.sinks import strict

    echo(json.dumps(strict(content), indent=2, default=str, allow_nan=False))


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Errors of the operating system become a `UserError` of `where`; not a `BrokenPipeError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"cannot be used ({error.strerror or error})"
        raise UserError(where, problem, "check the path, its mode and the room on the disk") from None


def refuse_existing(out: str, *, force: bool) -> None:
    """Refuse to replace a file or directory without `--force`, and an empty `--out`."""
    if not out:  # of a shell's variable that is not set
        raise BadParameter("it is empty", param_hint="--out")
    if os.path.exists(out) and not force:
        raise UserError(out, "exists already", "name another file, or add --force")


def put_text(text: str, out: str) -> None:
    """Write to a file, in a directory that may have to be made. Raises UserError: it cannot be written."""
    with writing(out):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_file(Path(out), text, follow=True)
    echo(f"wrote {out}", err=True)
