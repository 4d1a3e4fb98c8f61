"""`train data inspect` and `train data verify`: what is in a corpus or in files, and whether all of it can be read."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.cli.data_build import progress_bar
from trainer.data.formats.documents import ReadOptions
from trainer.data.inspection.survey import Survey, survey
from trainer.data.inspection.verify import verify
from trainer.data.streams.layout import discover
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserErrors

NUM_TOP_IDS = 10
WIDTH = 110  # where stdout is no terminal


@dataclass(frozen=True)
class Reading:
    """How the files are read, as on the command line; see `ReadOptions`."""

    tokenizer: str
    vocab_size: int
    format: str
    dtype: str | None
    eod: int | None

    def options(self) -> ReadOptions:
        """The options, with the tokenizer loaded."""
        return ReadOptions(load_tokenizer(self.tokenizer, vocab_size=self.vocab_size), self.dtype, self.eod)


@dataclass(frozen=True)
class Cutting:
    """How documents are cut, as on the command line; see `build_groups`."""

    seq_len: int
    max_group_cells: int
    pack: bool


def inspect_data(paths: list[str], reading: Reading, cutting: Cutting, *, as_json: bool) -> None:
    """Print what is there, as tables or as JSON.

    Raises:
        UserError: nothing is there, or the first file that is damaged.
    """
    found_at = discover(paths, format=reading.format)
    options = reading.options()
    with progress_bar() as report:
        found = survey(found_at.streams, options, format=reading.format, **asdict(cutting), report=report)
    content = _content(paths, found_at.layout, reading, cutting, found, options.tokenizer)
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    else:
        _print_tables(content)


def verify_data(paths: list[str], reading: Reading) -> None:
    """Read everything; say so on stdout if all is well.

    Raises:
        UserErrors: one for each damaged file.
    """
    found_at = discover(paths, format=reading.format)
    root = Path(paths[0]) if found_at.layout == "nested" else None
    with progress_bar() as report:
        verdict = verify(found_at.streams, reading.options(), format=reading.format, root=root, report=report)
    if verdict.errors:
        raise UserErrors(verdict.errors)
    hashes = ", hashes as in manifest.json" if verdict.is_hashed else ""
    counts = f"{verdict.streams:,} streams, {verdict.documents:,} documents, {verdict.tokens:,} tokens"
    typer.echo(f"{counts}: no damage{hashes}")


def _content(
    paths: list[str], layout: str, reading: Reading, cutting: Cutting, found: Survey, tokenizer: Tokenizer
) -> dict[str, Any]:
    total = max(int(found.counts.sum()), 1)
    types = found.type_counts(tokenizer)
    return {
        "paths": paths,
        "layout": layout,
        "reading": asdict(reading),
        "cutting": asdict(cutting),
        "totals": found.total(cutting.seq_len),
        "modalities": {name: found.total(cutting.seq_len, name) for name in found.modalities},
        "histogram": {
            "vocab_size": tokenizer.vocab_size,
            "distinct_ids": int((found.counts > 0).sum()),
            "types": {name: {"tokens": count, "share": count / total} for name, count in types.items()},
            "top_ids": [
                {"id": i, "text": _text(tokenizer, i), "tokens": count, "share": count / total}
                for i, count in found.top_ids(NUM_TOP_IDS)
            ],
        },
        "streams": [asdict(facts) for facts in found.streams],
    }


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode(np.array([token_id], dtype=np.int64))


def _print_tables(content: dict[str, Any]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    cutting = content["cutting"]
    how = f"layout {content['layout']}; cells of {cutting['seq_len']} tokens, at most {cutting['max_group_cells']} a group"
    names = ("streams", "documents", "tokens", "groups", "cells")
    console.print(how + (", short documents packed" if cutting["pack"] else ""), highlight=False)
    table = Table()
    table.add_column("modality")
    for name in (*names, "padding"):
        table.add_column(name, justify="right")
    rows = list(content["modalities"].items())
    for name, facts in [*rows, *([("all", content["totals"])] if len(rows) > 1 else [])]:
        table.add_row(name, *(f"{facts[key]:,}" for key in names), f"{facts['padding_share']:.1%}")
    console.print(table)
    histogram = content["histogram"]
    if histogram["types"]:
        console.print(_shares("type", [(n, e) for n, e in histogram["types"].items() if e["tokens"]]))
    title = f"most frequent of {histogram['distinct_ids']:,} ids that occur (vocabulary {histogram['vocab_size']:,})"
    console.print(title, highlight=False)
    console.print(_shares("id", [(f"{e['id']} {e['text']!r}", e) for e in histogram["top_ids"]]))
    empty = content["totals"]["empty_documents"]
    if empty:
        console.print(f"{empty:,} documents have no token and are never read", highlight=False)


def _shares(kind: str, rows: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table()
    table.add_column(kind)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    for name, entry in rows:
        table.add_row(escape(name), f"{entry['tokens']:,}", f"{entry['share']:.2%}")
    return table
