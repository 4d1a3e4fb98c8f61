"""Further formats of records: compressed JSON lines, gzip or zstandard, and Arrow files in its stream
or its file format, also in directories by Hugging Face's `save_to_disk`.

All but gzip needs the extra `parquet` (pyarrow). They are read from beginning to end, in bounded
memory.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data.documents import ReadOptions, TokenArray, damaged
from trainer.data.formats import BATCH, BATCH_ROWS, find_column, pieces_of_lines, pieces_of_rows, pyarrow_for
from trainer.wording import few

LONGEST_LINE = 1 << 30  # bytes; a few compressed ones may stand for more than the memory holds
ARROW_FILE, STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
# What `save_to_disk` writes beside its files, and above the directories of splits.
SAVED, SPLITS = "state.json", "dataset_dict.json"


def compressed_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document of JSON lines, tokenized while they are decompressed."""
    if path.suffix.lower() == ".gz":
        try:
            with gzip.open(path) as lines:
                yield from pieces_of_lines(path, _short_lines(path, lines), options)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(path, f"is not a whole gzip file ({error})") from error
    else:  # the package zstandard takes a file that was cut for a whole one
        with pyarrow_for(path, "zstandard") as pyarrow, pyarrow.input_stream(str(path), "zstd") as stream:
            yield from pieces_of_lines(path, _short_lines(path, io.BufferedReader(stream)), options)


def _short_lines(path: Path, lines: Any) -> Iterator[bytes]:
    while line := lines.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise damaged(path, f"has a line of more than {LONGEST_LINE:,} bytes", "cut the document")
        yield line


def arrow_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while batches are read from the mapped file."""
    with pyarrow_for(path, "Arrow") as pyarrow, pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(len(ARROW_FILE)) == ARROW_FILE:
            file = pyarrow.ipc.open_file(mapped)
            schema, batches = file.schema, map(file.get_batch, range(file.num_record_batches))
        else:
            mapped.seek(mapped.size() - len(STREAM_END))
            if mapped.read() != STREAM_END:  # pyarrow does not see a cut between two batches
                raise damaged(path, "has no end of an Arrow stream", "copy or write it again")
            mapped.seek(0)
            batches = pyarrow.ipc.open_stream(mapped)
            schema = batches.schema
        column = find_column(path, schema, pyarrow, options.column)
        yield from pieces_of_rows(path, _parts(batches, column.name), column, options)


def _parts(batches: Any, name: str) -> Iterator[Any]:
    """The batches, in parts of little text."""
    for batch in batches:
        batch.column(name).validate(full=True)  # damaged offsets would be read beyond the file
        rows = max(1, min(BATCH_ROWS, BATCH * len(batch) // max(batch.nbytes, 1)))
        yield from (batch.slice(at, rows) for at in range(0, len(batch), rows))


def files_of_data_sets(paths: Sequence[str]) -> list[str]:
    """Those of Arrow files that the lists in their directories name: others there are caches, copies.

    Raises UserError: one is missing, or they are of several splits of a data set.
    """
    found = {*paths}
    folders = sorted({Path(path).parent for path in paths})
    for folder in folders:
        if (folder.parent / SPLITS).is_file():
            splits = [each.name for each in folders if each.parent == folder.parent]
            example = min(splits, key="train".__ne__)
            if len(splits) > 1:
                fix = f'name one: paths = ["{folder.parent}/{example}"]'
                raise damaged(folder.parent, f"is a data set of splits: {few(splits)}", fix)
        if (folder / SAVED).is_file():
            try:
                names = {str(each["filename"]) for each in json.loads((folder / SAVED).read_bytes())["_data_files"]}
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise damaged(folder / SAVED, f"does not list the files of a data set ({error!r})") from error
            lost = sorted(name for name in names if not (folder / name).is_file())
            if lost:
                raise damaged(folder, f"lacks {few(lost)}, which its {SAVED} lists", "copy it again")
            found -= {path for path in paths if Path(path).parent == folder and Path(path).name not in names}
    return [*found]
