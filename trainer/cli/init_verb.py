"""`train init`: a first config for the user's own data."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def init(
    paths: Annotated[
        list[str], typer.Argument(help="Your data: a directory, files or globs.", metavar="PATH_TO_DATA...")
    ],
    out: Annotated[str | None, typer.Option(help="Write it here; absent: to stdout.", metavar="X.TOML")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="As data.tokenizer; absent: bytes for text, ids for token ids.", metavar="NAME")
    ] = None,
    format: Annotated[
        str, typer.Option(help="auto: by file extension; a format's name; or package.module:function.", metavar="NAME")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Of headerless .bin files; absent: guessed.", metavar="DTYPE")
    ] = None,
    eod: Annotated[
        int | None, typer.Option(help="The id that ends a document in .npy and headerless .bin files.")
    ] = None,
) -> None:
    """Look at your data and write a commented config that trains on them."""
    from trainer.cli.init_config import init_config

    init_config(paths, out=out, force=force, format=format, dtype=dtype, eod=eod, tokenizer=tokenizer)
