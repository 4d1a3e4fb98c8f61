"""Inspect the user's data, and choose what `train init` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.data_tables import DataTable
from trainer.data.documents import ReadOptions
from trainer.data.formats import is_import_path, takes_option
from trainer.data.groups import CutOptions
from trainer.data.layout import Discovery, Stream, discover, discover_direct, refuse_empty, refuse_unheeded
from trainer.data.stored import Cache, discover_stored
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.metrics.progress_bar import progress_bar
from trainer.storage import is_url
from trainer.tools.init.mix import Part, parts_of
from trainer.tools.init.shares import Mix
from trainer.tools.init.starter import Starter, StarterSource
from trainer.tools.inspection.encoding import describe, not_text
from trainer.tools.inspection.guess import Guess, Look, guess, look
from trainer.tools.inspection.sizing import Sizes, choose_sizes, holds_out_each
from trainer.tools.inspection.survey import Survey, survey
from trainer.wording import counted

MAX_BYTES = 256_000_000  # of larger data, only evenly spread streams are inspected
MOST_SOURCES = 32  # modalities that get a source of their own, each with open streams of its own
FEW_DOCUMENTS = 4  # streams with fewer leave rows of a batch empty


def make_starter(
    paths: list[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    eod: int | None = None,
    tokenizer: str | None = None,
    weights: Mix = Mix.tokens,
) -> Starter:
    """The starter config for the data at `paths`; the other arguments are the verb's options.

    Raises:
        UserError: there is nothing to train on.
    """
    paths = [path if is_url(path) else str(Path(path).expanduser()) for path in paths]
    if any(map(is_url, paths)):
        at = discover_stored(paths, format=format, cache=Cache.of(None, DataTable.model_fields["cache_gb"].default))
    else:
        at = discover(paths, format=format)
    refuse_empty(at.streams)
    refuse_unheeded(at.streams, format, {"dtype": dtype, "eod": eod})
    kind = guess(at.streams, format=format, dtype=dtype)
    if is_import_path(format) and tokenizer == "ids":  # what a format of the user's own yields is not visible here
        kind = replace(kind, kind="ids")
    named = tokenizer or ("bytes" if kind.kind == "text" else "ids")
    chosen, share = sample_streams(at.streams)
    with progress_bar() as report:
        seen = look(chosen, kind, tokenizer=named, format=format, eod=eod, report=report)
        if not any(each.any() for each in seen.lengths):
            raise UserError(paths[0], "holds no token at all", "name files with text or token ids in them")
        names, modalities = [s.relative_path for s in chosen], [s.modality for s in chosen]
        sizes = choose_sizes(names, seen.lengths, share=share, modalities=modalities)
        vocab_size = seen.largest_id + 1 if named == "ids" else 0
        options = ReadOptions(load_tokenizer(named, vocab_size=vocab_size), kind.dtype, eod, format=format)
        found = survey(chosen, options, CutOptions("", sizes.seq_len, sizes.max_group_cells, sizes.pack), report=report)
        parts = parts_of(chosen, seen.lengths, sizes, weights)
        held_out = holds_out_each(names, seen.lengths, modalities, sizes.holdout_fraction)
    notes = _notes(at, seen, kind, share, sizes)
    if strange := not_text(chosen, format):
        notes.append(describe(strange, len(chosen)))
    if (
        sizes.holdout_fraction
        and len(parts) > 1
        and (without := [each for each, holds in held_out.items() if not holds])
    ):
        notes.append(
            f"all modalities are one source, without weights: in {', '.join(without)} no document would be held out, and "
            "evaluation needs some of every source; train check shows what is drawn of each"
        )
        parts = []
    keys = _source_keys(kind, format=format, eod=eod)
    name = _run_name(paths[0])
    return Starter(
        name=name,
        found=_found_lines(at, chosen, found, kind, sizes),
        notes=notes,
        sources=_sources(at, parts, name, keys, format=format),
        mix=weights,
        tokenizer=named,
        vocab_size=vocab_size,
        num_ids=options.tokenizer.vocab_size,
        largest_id=(seen.largest_id, seen.largest_id_count),
        suggests_eod=eod is None and any(takes_option(name, "eod") for name in kind.formats),
        sizes=sizes,
        length=f"about {counted(sizes.passes, 'pass')} over the data on 1 rank",
    )


def sample_streams(streams: Sequence[Stream], max_bytes: int = MAX_BYTES) -> tuple[list[Stream], float]:
    """(all streams, or evenly spread ones if there are more than `max_bytes`; their share of all bytes).

    Raises:
        UserError: a file is gone, or all are empty.
    """
    try:
        sizes = np.array([Path(stream.path).stat().st_size for stream in streams], dtype=np.float64)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be read: {error.strerror}", "check the path") from None
    total = float(sizes.sum())
    if total <= max_bytes:
        return list(streams), 1.0
    stride = int(np.ceil(total / max_bytes))
    chosen = range(0, len(streams), stride)
    return [streams[i] for i in chosen], float(sizes[list(chosen)].sum()) / total


def _run_name(path: str) -> str:
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
        lines[0] += f" in the {len(chosen):,} streams that were inspected"
    for name in found.modalities if len(found.modalities) > 1 else []:
        facts = found.total(sizes.seq_len, name)
        lines.append(
            f"  modality {name}: {counted(facts['streams'], 'stream')}, {counted(facts['documents'], 'document')}, "
            f"{facts['tokens']:,} tokens"
        )
    return lines


def _notes(at: Discovery, seen: Look, kind: Guess, share: float, sizes: Sizes) -> list[str]:
    notes = []
    if share < 1.0:
        notes.append(f"only {share:.0%} of the bytes were inspected; ids or lengths may differ in the rest")
    if at.left_out:
        names = ", ".join(at.left_out[:3]) + (", ..." if len(at.left_out) > 3 else "")
        notes.append(f"not read, because not in a modality's directory: {names}")
    if kind.dtype is not None:
        notes.append(f"the dtype {kind.dtype} is guessed from the files' bytes; --dtype overrides it")
    typical = float(np.median([len(each) for each in seen.lengths]))
    if kind.kind == "text" and typical < FEW_DOCUMENTS and len(seen.lengths) > 2 * FEW_DOCUMENTS:
        notes.append(
            "each file is a stream, and streams with few documents leave rows of a batch empty; "
            "train data build text merges many files into few streams"
        )
    lengths = np.concatenate(seen.lengths)
    num_cut = int((lengths > sizes.seq_len * sizes.max_group_cells).sum())
    if num_cut:
        verb = "is" if num_cut == 1 else "are"
        documents = counted(len(lengths), "document")
        notes.append(
            f"{num_cut:,} of {documents} {verb} longer than max_group_cells and {verb} cut into groups, so that "
            f"each stream fills the {counted(sizes.batch_size, 'row')} of a batch; a group starts without state. To carry it "
            "further, raise max_group_cells, and lower batch_size unless there are many documents"
        )
    return notes


def _sources(
    at: Discovery, parts: list[Part], name: str, keys: Mapping[str, Any], *, format: str
) -> list[StarterSource]:
    """One source per modality, where a config can name the modality alone; otherwise a single one."""
    whole: dict[str, Any] = {"layout": at.layout}
    whole |= {"root": at.root} if at.root is not None else {"paths": list(at.paths)}
    if at.root is not None:
        apart: dict[str, dict[str, Any]] = {part.modality: {"modalities": [part.modality]} for part in parts}
    else:
        apart = {}
        for path in at.paths if not any(map(is_url, at.paths)) else ():
            found = {stream.modality for stream in discover_direct([path], format=format)}
            if len(found) > 1:
                apart = {}
                break
            apart.setdefault(found.pop(), {"paths": []})["paths"].append(path)
    if not 1 < len(parts) <= MOST_SOURCES or not {part.modality for part in parts} <= apart.keys():
        return [StarterSource(name, {**whole, **keys})]
    return [StarterSource(part.source, {**whole, **apart[part.modality], **keys}, part) for part in parts]


def _source_keys(kind: Guess, *, format: str, eod: int | None) -> dict[str, Any]:
    """How the files are read."""
    keys = {"format": None if format == "auto" else format, "dtype": kind.dtype, "eod": eod}
    return {key: value for key, value in keys.items() if value is not None}
