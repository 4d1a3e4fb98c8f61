"""Looks at data that nobody has described: which files, of what kind, and which are damaged; and
writes a commented config that fits it."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions, damaged
from trainer.data.formats import FORMATS, format_name, load_documents, takes_option
from trainer.data.groups import held_out
from trainer.data.lanes import DOCUMENTS_PER_LANE
from trainer.data.layout import (
    NothingFound,
    Stream,
    discover_direct,
    discover_nested,
    fixed_part,
    is_data,
    refuse_empty_files,
    refuse_unheeded,
)
from trainer.data.tokenizer import IdsTokenizer
from trainer.errors import UserError
from trainer.lab.tokenizer_json import load_tokenizer
from trainer.tools.corpora import MAX_FILE_BYTES, why_not_text
from trainer.wording import counted, few


def file_kind(path: Path, name: str, column: str | None = None) -> Kind:
    """The kind of a file of the format `name`; `text` for formats by import path, and for files
    that cannot be read, of which reading will tell."""
    row = FORMATS.get(name)
    if row is None or name == "text":
        return "text"
    if row.pieces is not None:
        try:
            first = next(row.pieces(path, ReadOptions(IdsTokenizer(UNBOUNDED), column=column)), None)
        except (UserError, OSError):  # such as of text, which takes a tokenizer
            return "text"
        if first is None:
            raise damaged(path, "has no documents", "remove the file")
    return "ids"


def guess(streams: Sequence[Stream], options: ReadOptions) -> tuple[Kind, list[str]]:
    """Whether the files hold text or token ids, by the format and first record of each; and their
    formats. Raises UserError: both are mixed, or a file has no dtype or no documents."""
    examples: dict[Kind, str] = {}
    formats = set()
    for stream in streams:
        path = Path(stream.path)
        name = format_name(path, options.format)
        formats.add(name)
        examples.setdefault(file_kind(path, name, options.column), stream.path)
        if takes_option(name, "dtype") and options.dtype is None:
            problem = f"does not follow from {stream.path}, which has no header"
            raise UserError("dtype", problem, "give the type of its ids, such as --dtype uint16")
    if len(examples) > 1:
        problem = f"is text, and {examples['ids']} holds token ids: a run reads only one of the two"
        raise UserError(examples["text"], problem, "name those of one kind, with a glob in quotes")
    return next(iter(examples)), sorted(formats)


def look(streams: Sequence[Stream], options: ReadOptions) -> tuple[list[Ints], int]:
    """Read the streams once: tokens of each document, by stream; the largest id.
    Raises UserError: a file cannot be read or is damaged."""
    lengths: list[Ints] = []
    largest = 0
    for stream in streams:
        documents = load_documents(stream.path, options)
        lengths.append(documents.lengths)
        largest = max(largest, int(documents.tokens.max(initial=0)))
    return lengths, largest


def not_text(streams: Sequence[Stream], format: str) -> list[str]:
    """`FILE (why)` of each stream that is read as plain text and is not UTF-8 text, which the bytes
    tokenizer would not notice, by its first `MAX_FILE_BYTES`. `format`: as `data.source.format`."""
    found = []
    for stream in streams:
        if format_name(Path(stream.path), format) == "text":
            with open(stream.path, "rb") as file:
                content = file.read(MAX_FILE_BYTES)
            if why := why_not_text(content, is_whole=len(content) < MAX_FILE_BYTES):
                found.append(f"{stream.relative_path} ({why})")
    return found


def discover(paths: Sequence[str], *, format: str = "auto") -> tuple[list[Stream], dict[str, Any]]:
    """The streams at a user's paths, and the key that names them in a config: `root` of a single
    directory with one directory per modality, otherwise `paths`."""
    directory = Path(paths[0])
    if len(paths) > 1 or not directory.is_dir():
        return discover_direct(paths, format=format), {"paths": list(paths)}
    try:
        return discover_nested(directory, format=format), {"root": paths[0]}
    except NothingFound:
        files = [Path(path.name) for path in directory.iterdir() if path.is_file()]
        if not any(is_data(name, format) for name in files):
            raise
        pattern = os.path.join(glob.escape(paths[0]), "*")
        return discover_direct([pattern], format=format), {"paths": [pattern]}


def refuse_empty(streams: Sequence[Stream]) -> None:
    """Refuse streams of empty files, all of them at once."""
    paths = [stream.path for stream in streams if os.path.isfile(stream.path)]
    refuse_empty_files([path for path in paths if not os.path.getsize(path)], len(streams))


SEQ_LEN_RANGE = (16, 256)
LARGEST_BATCH = 8
TOKENS_PER_STEP, MOST_MICRO_BATCHES = 4096, 8
STEPS_RANGE = (100, 2000)
HOLDOUT_FRACTIONS = (0.02, 0.05, 0.1, 0.2)
MOST_HELD_OUT = 0.3
MAX_BYTES = 256_000_000  # of larger data, only evenly spread streams are inspected
UNBOUNDED = 1 << 40  # ids: more than any vocabulary has
TIE_FROM_VOCABULARY = 8192  # from here on, tied embeddings save most of a small model
# A string, number, boolean or list of them, as TOML writes it.
_toml = partial(json.dumps, ensure_ascii=False)


def choose_sizes(streams: Sequence[Stream], lengths: Sequence[Ints], *, share: float = 1.0) -> dict[str, float]:
    """Sizes of `[data]`, `[train]` and `[eval]` by key: about one epoch within `STEPS_RANGE`.

    `lengths`: tokens of each document, by stream; at least one document has a token. `share`: of
    all data that these streams are. `holdout_fraction` 0: too few documents to hold any out.
    `passes`: over the documents that are not held out.
    """
    total, holdout = sum(int(each.sum()) for each in lengths), 0.0
    kept = np.concatenate(lengths)
    for fraction in HOLDOUT_FRACTIONS:
        left = [
            each[~held_out(stream.relative_path, len(each), fraction)]
            for stream, each in zip(streams, lengths, strict=True)
        ]
        held = total - sum(int(each.sum()) for each in left)
        # Whole documents are held out: a fraction of few may hold out none, or most of the text.
        if total * fraction / 4 <= held <= total * MOST_HELD_OUT:
            kept, holdout = np.concatenate(left), fraction
            break
    trained = int(kept.sum()) / share
    # A power of two of which little data still gives some cells.
    seq_len = int(np.clip(1 << max(int(kept.sum()) // 64, 1).bit_length() - 1, *SEQ_LEN_RANGE))
    documents = int(np.count_nonzero(kept) / share)
    batch = int(np.clip(documents, 1, LARGEST_BATCH))
    micro = int(np.clip(round(TOKENS_PER_STEP / (batch * seq_len)), 1, MOST_MICRO_BATCHES))
    if batch * micro > documents // DOCUMENTS_PER_LANE >= 2:  # none continues another's
        batch, micro = documents // DOCUMENTS_PER_LANE // 2, 2
    steps = int(np.clip(round(trained / (batch * seq_len * micro)), *STEPS_RANGE))
    passes = steps * batch * seq_len * micro / trained
    sizes = {"seq_len": seq_len, "batch_size": batch, "micro_batches": micro, "steps": steps}
    return {**sizes, "passes": passes, "holdout_fraction": holdout}


def starter(
    paths: Sequence[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    eod: int | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
) -> tuple[str, list[str]]:
    """A config for the data at `paths`, and what the user should check in it; the other arguments
    are the verb's options. Raises UserError: there is nothing to train on."""
    paths = [str(Path(os.path.expanduser(path))) for path in paths]  # `~nobody` stays
    if odd := [path for path in paths if re.search("[\udc80-\udcff]", path)]:  # no UTF-8
        raise damaged(odd[0], "is not a name in UTF-8, which a config must be", "rename it, or name a link to it")
    streams, where = discover(paths, format=format)
    refuse_empty(streams)
    given = {"dtype": dtype, "eod": eod, "column": column}
    refuse_unheeded(streams, format, given)
    chosen, share = sample_streams(streams)
    options = ReadOptions(IdsTokenizer(UNBOUNDED), format=format, dtype=dtype, eod=eod, column=column)
    kind, formats = guess(chosen, options)
    notes = []
    if share < 1.0:
        notes.append(f"only {share:.2%} of the bytes were inspected; the rest may differ")
    if tokenizer is None:
        tokenizer = {"text": "bytes", "ids": "ids"}[kind]
    if tokenizer != "ids":
        options = replace(options, tokenizer=load_tokenizer(tokenizer))
    lengths, largest = look(chosen, options)
    if not any(each.any() for each in lengths):
        raise UserError(paths[0], "holds no token at all", "name files with text or ids")
    if strange := not_text(chosen, format):
        what = f"not UTF-8 text: {len(strange):,} of {counted(len(chosen), 'file')}, {few(strange)}"
        fix = "convert to UTF-8, or copy the other files with train data build text, which skips such ones"
        notes.append(f"{what}; a run would read the bytes as they are; {fix}")
    vocab_size = largest + 1 if tokenizer == "ids" else 0
    sizes = choose_sizes(chosen, lengths, share=share)
    documents = counted(sum(map(len, lengths)), "document")
    if not sizes["holdout_fraction"]:
        problem = f"almost none of {documents}, or more than {MOST_HELD_OUT:.0%} of the text"
        notes.append(f"no [eval]: it would hold out {problem}; add an [[eval.source]]")
    # Lines of the template that begin with one of these and a bar are optional.
    shown = {
        "ids": bool(vocab_size),
        "large": (vocab_size or options.tokenizer.vocab_size) >= TIE_FROM_VOCABULARY,
        "bytes": tokenizer == "bytes",
        "held out": sizes["holdout_fraction"] > 0,
    }
    lines, template = [], resources.files("trainer.tools") / "reference" / "starter.toml.in"
    for line in template.read_text(encoding="utf-8").splitlines(keepends=True):
        mark, _, rest = line.partition("|")
        if shown.get(mark, True):
            lines.append(rest if mark in shown else line)
    tokens = sum(int(each.sum()) for each in lengths)
    found = f"{len(chosen):,} of {counted(len(streams), 'stream')}, {documents}, {tokens:,} tokens"
    head = [f"Found: {found} ({', '.join(formats)}), tokenizer {tokenizer}"]
    head += [f"Note: {note}" for note in notes]
    keys = {"name": _run_name(paths[0]), **where, **given}
    if format != "auto":
        keys["format"] = format
    source = ["[[data.source]]"]
    source += [f"{key} = {_toml(value)}" for key, value in keys.items() if value is not None]
    if eod is None and any(takes_option(name, "eod") for name in formats):
        source.append("# eod = ...   # id that ends a document; without it a file is one")
    text = "".join(lines).format(
        **sizes | {"passes": counted(round(sizes["passes"], 2), "pass")},
        name=_toml(_run_name(paths[0])),
        tokenizer=_toml(tokenizer),
        head="\n".join(f"# {line}" for line in head),
        largest=largest,
        vocab_size=vocab_size,
        source="\n".join(source),
        every=max(sizes["steps"] // 10, 10),
        warmup=sizes["steps"] // 20,
        save=max(sizes["steps"] // 5, 1),
    )
    return text, notes


def sample_streams(streams: Sequence[Stream]) -> tuple[list[Stream], float]:
    """(all streams, or evenly spread ones if there are more than `MAX_BYTES`; their share)."""
    sizes = np.array([Path(stream.path).stat().st_size for stream in streams], dtype=np.float64)
    total = float(sizes.sum())
    if total <= MAX_BYTES:
        return list(streams), 1.0
    chosen = range(0, len(streams), int(np.ceil(total / MAX_BYTES)))
    return [streams[i] for i in chosen], float(sizes[list(chosen)].sum()) / total


def _run_name(path: str) -> str:
    """A run's name from the data's path, or the last part of it that is no glob."""
    found = Path(path)
    if not found.exists():
        found = fixed_part(path)
    name = found.resolve().name.removesuffix(found.suffix * found.is_file())
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:40] or "run"
