"""What `train init` does: look at the data, and write a config that trains on them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from trainer.cli.config_verbs import put_text
from trainer.cli.counts import counted
from trainer.cli.data_build import progress_bar
from trainer.cli.starter import Starter, render_starter
from trainer.config.docs import render_config_schema
from trainer.data.formats.documents import ReadOptions
from trainer.data.formats.own_format import is_import_path
from trainer.data.formats.registry import takes_option
from trainer.data.inspection.guess import Guess, Look, guess, look
from trainer.data.inspection.sizing import Sizes, choose_sizes
from trainer.data.inspection.survey import Survey, survey
from trainer.data.streams.layout import Discovery, Stream, discover
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError

MOST_BYTES = 256_000_000  # of larger data evenly spread streams are looked at
SCHEMA_NAME = "config.schema.json"
MOST_NAMES = 20  # of empty files
FEW_DOCUMENTS = 4  # a stream of fewer leaves rows of a batch empty


def init_config(
    paths: list[str],
    *,
    out: str | None,
    force: bool,
    format: str,
    dtype: str | None,
    eod: int | None,
    tokenizer: str | None,
) -> None:
    """Write a commented config for the data at `paths`, to `out` or to stdout; what to do next goes to stderr.

    Raises:
        UserError: nothing that can be trained on is there, or `out` exists.
    """
    if out is not None and Path(out).exists() and not force:
        raise UserError(out, "exists already", "name another file, or add --force")
    paths = [str(Path(path).expanduser()) for path in paths]
    at = discover(paths, format=format)
    refuse_empty(at.streams)
    kind = guess(at.streams, format=format, dtype=dtype)
    if is_import_path(format) and tokenizer == "ids":  # what such a format reads cannot be seen from outside
        kind = replace(kind, kind="ids")
    named = tokenizer or ("bytes" if kind.kind == "text" else "ids")
    chosen, share = sample_streams(at.streams)
    with progress_bar() as report:
        seen = look(chosen, kind, tokenizer=named, format=format, eod=eod, report=report)
        if not any(each.any() for each in seen.lengths):
            raise UserError(paths[0], "holds no token at all", "name files with text or token ids in them")
        sizes = choose_sizes([s.relative_path for s in chosen], seen.lengths, share=share)
        vocab_size = seen.largest_id + 1 if named == "ids" else 0
        options = ReadOptions(load_tokenizer(named, vocab_size=vocab_size), kind.dtype, eod)
        found = survey(
            chosen,
            options,
            format=format,
            seq_len=sizes.seq_len,
            max_group_cells=sizes.max_group_cells,
            pack=sizes.pack,
            report=report,
        )
    starter = Starter(
        name=_name(paths[0]),
        found=_found_lines(at, chosen, found, kind, sizes),
        notes=_notes(at, seen, kind, share),
        source=_source_keys(at, kind, format=format, eod=eod),
        tokenizer=named,
        vocab_size=vocab_size,
        num_ids=options.tokenizer.vocab_size,
        largest_id=(seen.largest_id, seen.largest_id_count),
        names_eod=eod is None and any(takes_option(name, "eod") for name in kind.formats),
        sizes=sizes,
    )
    _write(starter, out)


def refuse_empty(streams: Sequence[Stream]) -> None:
    """Refuse files of no byte, as a run would: all of them at once.

    Raises:
        UserError: there are some.
    """
    empty = [stream.path for stream in streams if os.path.isfile(stream.path) and not os.path.getsize(stream.path)]
    if not empty:
        return
    names = ", ".join(empty[:MOST_NAMES]) + (", ..." if len(empty) > MOST_NAMES else "")
    problem = f"of {counted(len(streams), 'file')} {len(empty):,} {'is' if len(empty) == 1 else 'are'} empty"
    fix = "a run refuses them: remove them, or copy the others with train data build text, which passes over them"
    raise UserError(names, problem, fix)


def sample_streams(streams: Sequence[Stream], most_bytes: int = MOST_BYTES) -> tuple[list[Stream], float]:
    """All streams, or of more than `most_bytes` evenly spread ones; and their share of all bytes.

    Raises:
        UserError: a file is gone, or all are empty.
    """
    try:
        sizes = np.array([Path(stream.path).stat().st_size for stream in streams], dtype=np.float64)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be read: {error.strerror}", "check the path") from None
    total = float(sizes.sum())
    if total <= most_bytes:
        return list(streams), 1.0
    stride = int(np.ceil(total / most_bytes))
    chosen = range(0, len(streams), stride)
    return [streams[i] for i in chosen], float(sizes[list(chosen)].sum()) / total


def _name(path: str) -> str:
    """A run's name from the data's path: the last part that has a plain character."""
    stem = next((part for part in reversed(Path(path).resolve().parts) if re.search(r"[A-Za-z0-9]", part)), "run")
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(stem).stem).strip("-_")
    return plain[:40] or "run"


def _found_lines(at: Discovery, chosen: list[Stream], found: Survey, kind: Guess, sizes: Sizes) -> list[str]:
    total = found.total(sizes.seq_len)
    what = "bytes of text" if kind.kind == "text" else "token ids"
    lines = [
        f"Found: {counted(len(at.streams), 'stream')} in layout {at.layout}, {what} ({', '.join(kind.formats)}); "
        f"{counted(total['documents'], 'document')}, {total['tokens']:,} tokens, {total['padding_share']:.0%} padding in cells"
    ]
    if len(chosen) < len(at.streams):
        lines[0] += f" in the {len(chosen):,} streams that were looked at"
    for name in found.modalities if len(found.modalities) > 1 else []:
        facts = found.total(sizes.seq_len, name)
        lines.append(
            f"  modality {name}: {counted(facts['streams'], 'stream')}, {counted(facts['documents'], 'document')}, "
            f"{facts['tokens']:,} tokens"
        )
    return lines


def _notes(at: Discovery, seen: Look, kind: Guess, share: float) -> list[str]:
    notes = []
    if share < 1.0:
        notes.append(f"only {share:.0%} of the bytes were looked at; ids or lengths may differ in the rest")
    if at.left_out:
        names = ", ".join(at.left_out[:3]) + (", ..." if len(at.left_out) > 3 else "")
        notes.append(f"not read, since they lie in no modality's directory: {names}")
    if kind.dtype is not None:
        notes.append(f"the dtype {kind.dtype} is a guess from the files' bytes; --dtype says it")
    typical = float(np.median([len(each) for each in seen.lengths]))
    if kind.kind == "text" and typical < FEW_DOCUMENTS and len(seen.lengths) > 2 * FEW_DOCUMENTS:
        notes.append("a file is a stream, and few documents a stream leave rows of a batch empty;")
        notes.append("  train data build text puts many files into few streams")
    return notes


def _source_keys(at: Discovery, kind: Guess, *, format: str, eod: int | None) -> dict[str, Any]:
    keys: dict[str, Any] = {"layout": at.layout}
    if at.root is not None:
        keys["root"] = at.root
    else:
        keys["paths"] = list(at.paths)
    if format != "auto":
        keys["format"] = format
    return keys | {key: value for key, value in (("dtype", kind.dtype), ("eod", eod)) if value is not None}


def _write(starter: Starter, out: str | None) -> None:
    if out is None:
        put_text(render_starter(starter, schema=None), None)
        return
    put_text(render_starter(starter, schema=SCHEMA_NAME), out)
    put_text(render_config_schema(), str(Path(out).with_name(SCHEMA_NAME)))
    for note in starter.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"next: train check --config {out}, then: train --config {out}", err=True)
