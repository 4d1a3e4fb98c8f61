"""`train init`: a first config for the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.cli.options import EodOption, FormatOption
from trainer.cli.terminal import echo, put_text, refuse_existing

SCHEMA_NAME = "config.schema.json"


def init(
    paths: Annotated[
        list[str], typer.Argument(help="Your data: a directory, files or globs.", metavar="PATH_TO_DATA...")
    ],
    out: Annotated[str | None, typer.Option(help="File to write; default: stdout.", metavar="X.TOML")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="As data.tokenizer; default: bytes for text, ids for token ids.", metavar="NAME")
    ] = None,
    format: FormatOption = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Of headerless .bin files; default: guessed.", metavar="DTYPE")
    ] = None,
    eod: EodOption = None,
    weights: Annotated[
        Literal["tokens", "sqrt", "equal"],
        typer.Option(
            help="How often each modality is drawn: by its training tokens, by their square root, or equally."
        ),
    ] = "tokens",
    minutes: Annotated[
        float, typer.Option(min=0, help="Longest time of the run, from a few timed steps; 0: one pass, untimed.")
    ] = 5.0,
) -> None:
    """Inspect your data and write a commented config that trains on it."""
    from trainer.tools.init.starter import render_starter
    from trainer.tools.init.survey import make_starter, timed
    from trainer.tools.reference_docs import render_config_schema

    if out is not None:
        refuse_existing(out, force=force)
    starter = make_starter(paths, format=format, dtype=dtype, eod=eod, tokenizer=tokenizer, weights=weights)
    if minutes:
        starter = timed(starter, minutes)
    put_text(render_starter(starter, schema=None if out is None else SCHEMA_NAME), out)
    if out is not None:
        put_text(render_config_schema(), str(Path(out).with_name(SCHEMA_NAME)))
        for note in starter.notes:
            echo(f"note: {note}", err=True)
        echo(f"{starter.sizes.steps:,} steps: {starter.length}", err=True)
        echo(f"next: train check --config {out}, then: train --config {out}", err=True)
