"""`train data build`: corpora in the NESTED layout, with a progress bar and a summary on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer

from trainer.cli.counts import counted
from trainer.data.corpus.documents import ReportProgress
from trainer.data.corpus.manifest import Manifest
from trainer.data.corpus.pytext import build_pytext
from trainer.data.corpus.text import build_text
from trainer.errors import UserError


def build_pytext_corpus(out: str, *, force: bool) -> None:
    """Build the default corpus and say what is in it."""
    with progress_bar() as progress:
        manifest = build_pytext(Path(out), force=force, progress=progress)
    _summarise(out, manifest)


def build_text_corpus(out: str, modalities: list[str], *, force: bool) -> None:
    """Build a corpus of the user's files; `modalities` are `NAME=GLOB`, a name may come more than once.

    Raises:
        UserError: an argument is not of that form, or as `build_text`.
    """
    globs: dict[str, list[str]] = {}
    for text in modalities:
        name, separator, pattern = text.partition("=")
        if not separator or not name or not pattern:
            raise UserError(
                f"--modality {text}", "is not of the form NAME=GLOB", "write --modality 'prose=docs/**/*.md'"
            )
        globs.setdefault(name, []).append(pattern)
    with progress_bar() as progress:
        manifest = build_text(Path(out), globs, force=force, progress=progress, warn=partial(typer.echo, err=True))
    _summarise(out, manifest)


@contextmanager
def progress_bar() -> Iterator[ReportProgress | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=Console(file=sys.stderr), redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("reading")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _summarise(out: str, manifest: Manifest) -> None:
    if manifest.skipped:
        typer.echo(f"{len(manifest.skipped)} files were skipped; the manifest says which and why", err=True)
    for modality in manifest.modalities:
        totals = manifest.totals(modality)
        size = f"{totals['text_bytes'] / 1e6:.1f} MB of text"
        typer.echo(
            f"{modality}: {counted(totals['documents'], 'document')}, {counted(totals['streams'], 'stream')}, {size}",
            err=True,
        )
    typer.echo(f"the corpus is in {out}; what is in it: {out}/manifest.json", err=True)
