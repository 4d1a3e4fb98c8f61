"""The table of formats: which loader reads which file."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from trainer.data.formats.documents import ArrayDocuments, Documents, ReadOptions, TokenTable
from trainer.data.formats.jsonl import load_jsonl
from trainer.data.formats.megatron import load_megatron
from trainer.data.formats.own_format import find_loader, is_import_path, load_own
from trainer.data.formats.parquet import load_parquet
from trainer.data.formats.text import load_text
from trainer.data.formats.token_arrays import load_bin, load_npy
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Args:
        suffixes: the endings of file names that the format is told by.
        load: reads a file.
        beside: the format is told by a second file with this ending too; that file is no stream of its own.
    """

    suffixes: tuple[str, ...]
    load: Callable[[Path, ReadOptions], TokenTable]
    beside: str | None = None


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "text": Format((".txt", ".md", ".py"), load_text),
        "jsonl": Format((".jsonl",), load_jsonl),
        "npy": Format((".npy",), load_npy),
        "megatron": Format((".bin",), load_megatron, beside=".idx"),
        "bin": Format((".bin",), load_bin),
        "parquet": Format((".parquet",), load_parquet),
    }
)
TEXT_SPLITS = ("file", "blank_line")


def suffixes() -> tuple[str, ...]:
    """All file name endings that some format is told by."""
    return tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def index_suffixes() -> tuple[str, ...]:
    """The endings of files that only say where things lie in the file beside them."""
    return tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def check_format(name: str) -> None:
    """Refuse a name that is neither `auto`, nor a row of the table, nor the import path of a function that can be called.

    Raises:
        UserError: so it is.
    """
    if is_import_path(name):
        find_loader(name)
    elif name != "auto" and name not in FORMATS:
        problem = f"must be one of auto, {', '.join(FORMATS)}, or an import path package.module:function; got {name!r}"
        raise UserError("format", problem, "take one of these, or write a format of your own")


def format_name(path: Path, name: str = "auto") -> str:
    """The name of the format that a file is read as: the given one, or, with `auto`, the first row that fits.

    Raises:
        UserError: no such format, or none is known for the file's name.
    """
    check_format(name)
    if name != "auto":
        return name
    for found, each in FORMATS.items():
        if path.suffix in each.suffixes and (each.beside is None or path.with_suffix(each.beside).exists()):
            return found
    raise UserError(str(path), f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def _load(path: Path, load: Callable[[Path, ReadOptions], TokenTable], options: ReadOptions) -> TokenTable:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            raise UserError(str(path), f"is {kind}, not a file", "name the files in it, or remove it")
        if status.st_size == 0:
            raise UserError(str(path), "the file is empty", "remove it")
        with path.open("rb"):  # what cannot be opened at all is not a matter of the format
            pass
        return load(path, options)
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read ({error.strerror or error})", "check the path and its mode"
        ) from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise UserError(repr(str(path)), "is no path: it has a NUL character", "correct the path") from error


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
        format: `auto` (by file name), a key of `FORMATS`, or an import path `package.module:function` (see `own_format`).
        tokenizer, dtype, eod, text_split: see `ReadOptions`.

    Raises:
        UserError: unknown format now; an unreadable or damaged file at the first use, with path, place and fix.
    """
    if text_split not in TEXT_SPLITS:
        raise UserError("text_split", f"must be one of {', '.join(TEXT_SPLITS)}; got {text_split!r}")
    options = ReadOptions(tokenizer=tokenizer, dtype=dtype, eod=eod, text_split=text_split)
    name = format_name(Path(path), format)
    load = partial(load_own, name) if is_import_path(name) else FORMATS[name].load
    return ArrayDocuments(partial(_load, Path(path), load, options))
