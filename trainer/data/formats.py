"""The table of formats: which loader reads which file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from trainer.data.documents import ArrayDocuments, Documents, ReadOptions, TokenTable
from trainer.data.jsonl import load_jsonl
from trainer.data.text import load_text
from trainer.data.token_arrays import load_bin, load_npy
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError


@dataclass(frozen=True)
class Format:
    """One row of the table: the file names it is told by, and how a file is read."""

    suffixes: tuple[str, ...]
    load: Callable[[Path, ReadOptions], TokenTable]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "text": Format((".txt", ".md", ".py"), load_text),
        "jsonl": Format((".jsonl",), load_jsonl),
        "npy": Format((".npy",), load_npy),
        "bin": Format((".bin",), load_bin),
    }
)
TEXT_SPLITS = ("file", "blank_line")


def suffixes() -> tuple[str, ...]:
    """All file name endings that some format is told by."""
    return tuple(suffix for each in FORMATS.values() for suffix in each.suffixes)


def _format_of(path: Path, name: str) -> Format:
    if name != "auto":
        if name not in FORMATS:
            raise UserError("format", f"must be one of auto, {', '.join(FORMATS)}; got {name!r}")
        return FORMATS[name]
    for each in FORMATS.values():
        if path.suffix in each.suffixes:
            return each
    raise UserError(str(path), f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def _load(path: Path, load: Callable[[Path, ReadOptions], TokenTable], options: ReadOptions) -> TokenTable:
    try:
        if path.stat().st_size == 0:
            raise UserError(str(path), "the file is empty", "remove it")
        return load(path, options)
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read ({error.strerror or error})", "check the path and its mode"
        ) from error


def open_documents(
    path: str | Path,
    *,
    format: str = "auto",
    tokenizer: Tokenizer,
    dtype: str | None = None,
    eod: int | None = None,
    text_split: str = "file",
) -> Documents:
    """The documents of a file; the file itself is read at the first use.

    Args:
        path: the file.
        format: `auto` (by file name) or a key of `FORMATS`.
        tokenizer, dtype, eod, text_split: see `ReadOptions`.

    Raises:
        UserError: unknown format now; an unreadable or damaged file at the first use, with path, place and fix.
    """
    if text_split not in TEXT_SPLITS:
        raise UserError("text_split", f"must be one of {', '.join(TEXT_SPLITS)}; got {text_split!r}")
    options = ReadOptions(tokenizer=tokenizer, dtype=dtype, eod=eod, text_split=text_split)
    return ArrayDocuments(partial(_load, Path(path), _format_of(Path(path), format).load, options))
