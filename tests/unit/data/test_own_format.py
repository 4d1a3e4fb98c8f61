"""Formats by import path: what they give is checked, and reads like any other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trainer.data.formats import open_documents
from trainer.data.layout import discover_nested
from trainer.data.tokenizer import BytesTokenizer
from trainer.errors import UserError

MODULE = """
import numpy as np
from trainer.data import TokenTable, table_from_pieces

def reversed_lines(path, options):
    lines = path.read_text().splitlines()
    return table_from_pieces([options.tokenizer.encode(line[::-1]) for line in lines], options.tokenizer.vocab_size)

def of(tokens, starts, lengths):
    return lambda path, options: TokenTable(np.asarray(tokens), np.asarray(starts), np.asarray(lengths))

alien_id = of([1, 2, 999], [0], [3])
too_long = of([1, 2, 3], [0, 2], [2, 2])
negative = of([1, 2, 3], [0, 2], [2, -1])
floats = of([1.0, 2.0], [0], [2])
matrix = of([[1, 2]], [0], [2])
uneven = of([1, 2], [0, 1], [2])

def no_table(path, options):
    return [1, 2]

def one_argument(path):
    return None

def missing(path, options):
    return open(str(path) + ".index")

def crashes(path, options):
    raise KeyError("header")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in a modality's directory, beside a module with formats."""
    (tmp_path / "formats_of_mine.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    path = tmp_path / "corpus" / "a" / "one.odd"
    path.parent.mkdir(parents=True)
    path.write_text("abc\nde\n", encoding="utf-8")
    yield path
    sys.modules.pop("formats_of_mine", None)


def read(path: Path, function: str) -> list[str]:
    tokenizer = BytesTokenizer()
    documents = open_documents(path, format=f"formats_of_mine:{function}", tokenizer=tokenizer)
    return [
        tokenizer.decode(np.asarray(documents.read(d, 0, int(n)), dtype=np.int64))
        for d, n in enumerate(documents.lengths)
    ]


def test_documents_are_those_that_the_function_gives(file: Path) -> None:
    assert read(file, "reversed_lines") == ["cba", "ed"]


def test_files_of_any_ending_are_streams_of_it(file: Path) -> None:
    (stream,) = discover_nested(file.parents[1], format="formats_of_mine:reversed_lines")
    assert stream.relative_path == "a/one.odd"
    with pytest.raises(UserError, match="has no stream files"):
        discover_nested(file.parents[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alien_id", "token id 999 at token 2 is outside the vocabulary"),
        ("too_long", r"document 1 is \[2, 4\) of 3 tokens"),
        ("negative", r"document 1 is \[2, 1\) of 3 tokens"),
        ("floats", r"lengths are float64 \[2\]"),
        ("matrix", r"lengths are int64 \[1, 2\]"),
        ("uneven", r"lengths are int64 \[2\], int64 \[2\], int64 \[1\]"),
        ("no_table", "returned a list"),
        ("one_argument", r"cannot be called with \(path, options\)"),
        ("missing", r"one.odd: cannot be read \(No such file or directory: .*one.odd.index\)"),
        (
            "crashes",
            r"one.odd \(read by formats_of_mine:crashes\): fails: KeyError: 'header' \(.*formats_of_mine.py:29\)",
        ),
        ("nothing", "has no function nothing"),
    ],
)
def test_what_does_not_fit_is_refused(file: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(file, function)
