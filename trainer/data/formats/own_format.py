"""User-defined formats: a function `(path, options) -> TokenTable`, named by its import path."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.documents import ReadOptions, TokenTable
from trainer.data.formats.id_bounds import IdBounds
from trainer.errors import UserError
from trainer.import_path import format_error, resolve_target


def is_import_path(format: str) -> bool:
    """Whether a format's name is `package.module:function`."""
    return ":" in format


def find_loader(format: str) -> Any:
    """The function behind an import path.

    Raises:
        UserError: it cannot be imported, or does not take a path and options.
    """
    load = resolve_target(format, "format")
    try:
        inspect.signature(load).bind(Path(), None)
    except TypeError as error:
        raise UserError("format", f"{format} cannot be called with (path, options): {error}", _FIX) from error
    except ValueError:  # C functions may have no signature
        pass
    return load


def load_own(format: str, path: Path, options: ReadOptions) -> TokenTable:
    """Read a file with the user's function, and check the result before anything is trained on it.

    Ids are checked against the vocabulary here too: a user's function need not have done so.

    Raises:
        UserError: the result is not a TokenTable, its parts do not fit together, or an id is outside the vocabulary.
    """
    load, where = find_loader(format), f"{path} (read by {format})"
    try:
        table = load(path, options)
    except (UserError, OSError):  # which say themselves what is wrong
        raise
    except Exception as error:
        raise UserError(where, f"fails: {format_error(error)}", "fix it there") from error
    if not isinstance(table, TokenTable):
        raise UserError(where, f"the format returned a {type(table).__name__}", _FIX)
    tokens = np.asarray(table.tokens)
    starts, lengths = np.asarray(table.starts), np.asarray(table.lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(where, f"tokens are {tokens.dtype} {list(tokens.shape)}, not integers [N]", _FIX)
    if starts.ndim != 1 or starts.shape != lengths.shape or {starts.dtype.kind, lengths.dtype.kind} - set("iu"):
        problem = f"starts are {starts.dtype} {list(starts.shape)}, lengths {lengths.dtype} {list(lengths.shape)}"
        raise UserError(where, problem, "return both as integers [number of documents]")
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    outside = np.flatnonzero((starts < 0) | (lengths < 0) | (starts + lengths > len(tokens)))
    if outside.size:
        at = int(outside[0])
        problem = f"document {at} is [{starts[at]}, {starts[at] + lengths[at]}) of {len(tokens)} tokens"
        raise UserError(where, problem, "documents must lie within the tokens")
    bounds = table.bounds or IdBounds.of(path, options.tokenizer).check_sample(tokens)
    return replace(table, tokens=tokens, starts=starts, lengths=lengths, bounds=bounds)


_FIX = "see trainer.data.formats.own_format: (path, options) -> TokenTable"
