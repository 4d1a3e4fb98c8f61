"""`train data ...`: make corpora, look at them, check them."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Make, look at and check data.", no_args_is_help=True)
build_app = typer.Typer(help="Build a corpus in the NESTED layout.", no_args_is_help=True)
synth_app = typer.Typer(help="Make up a corpus.", no_args_is_help=True)
app.add_typer(build_app, name="build")
app.add_typer(synth_app, name="synth")


@build_app.command()
def pytext(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")] = "data/pytext",
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Real text that every installation has: Python sources, C++ headers and prose of the installed packages."""
    from trainer.cli.data_build import build_pytext_corpus

    build_pytext_corpus(out, force=force)


@build_app.command()
def text(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")],
    modality: Annotated[list[str], typer.Option(help="A modality and its files; repeatable.", metavar="NAME=GLOB")],
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Your own text files, one document a file."""
    from trainer.cli.data_build import build_text_corpus

    build_text_corpus(out, modality, force=force)


@synth_app.command("key-recall")
def key_recall(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")],
    groups: Annotated[int, typer.Option(help="Groups over all streams.")] = 1024,
    cells: Annotated[int, typer.Option(help="Cells a group.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Bytes a cell.")] = 6,
    streams: Annotated[int, typer.Option(help="Files.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the symbols.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Groups whose first cell reveals what all later cells ask for: not to be learned without carried state."""
    from trainer.cli.data_synth import synth_key_recall

    synth_key_recall(out, groups=groups, cells=cells, seq_len=seq_len, streams=streams, seed=seed, force=force)


PathsArgument = Annotated[list[str], typer.Argument(help="A corpus's root, or files and globs.", metavar="PATH...")]
TokenizerOption = Annotated[
    str, typer.Option(help="As data.tokenizer: bytes, ids, or a tokenizer.json.", metavar="NAME")
]
VocabOption = Annotated[int, typer.Option(min=0, help="Tokenizer ids: how many ids there are.")]
FormatOption = Annotated[
    str, typer.Option(help="auto: by file extension; a format's name; or package.module:function.", metavar="NAME")
]
DtypeOption = Annotated[str | None, typer.Option(help="Of headerless .bin files.", metavar="DTYPE")]
EodOption = Annotated[int | None, typer.Option(help="The id that ends a document in .npy and headerless .bin files.")]


@app.command()
def inspect(
    paths: PathsArgument,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a cell, as data.seq_len.")] = 256,
    max_group_cells: Annotated[int, typer.Option(min=1, help="As data.max_group_cells.")] = 64,
    pack: Annotated[bool, typer.Option("--pack", help="As data.pack.")] = False,
    tokenizer: TokenizerOption = "bytes",
    vocab_size: VocabOption = 0,
    format: FormatOption = "auto",
    dtype: DtypeOption = None,
    eod: EodOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What is there: layout, modalities, streams, documents, groups, cells, padding, token histogram."""
    from trainer.cli.data_inspect import Cutting, Reading, inspect_data

    reading = Reading(tokenizer, vocab_size, format, dtype, eod)
    inspect_data(paths, reading, Cutting(seq_len, max_group_cells, pack), as_json=as_json)


@app.command()
def verify(
    paths: PathsArgument,
    tokenizer: TokenizerOption = "bytes",
    vocab_size: VocabOption = 0,
    format: FormatOption = "auto",
    dtype: DtypeOption = None,
    eod: EodOption = None,
) -> None:
    """Read everything once; report every damaged file, and exit with 2 if there is one."""
    from trainer.cli.data_inspect import Reading, verify_data

    verify_data(paths, Reading(tokenizer, vocab_size, format, dtype, eod))
