"""Files of a text format that are not text: binary ones, and those in another encoding than UTF-8.

The bytes tokenizer reads any bytes, so that nothing else would notice.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from trainer.data.formats import format_name
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.wording import counted, few

CHUNK_BYTES = 1 << 20
FIX = "convert to UTF-8, or copy the other files with train data build text, which skips such ones"


def why_not_text(path: Path) -> str:
    """Why the file is not UTF-8 text, by its first wrong byte; empty if it is.

    Raises:
        UserError: it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the chunk
    try:
        with path.open("rb") as file:
            while True:
                chunk = file.read(CHUNK_BYTES)
                begun = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    return (
                        f"not UTF-8: byte {error.object[error.start]:#04x} at offset {position - begun + error.start}"
                    )
                if "\0" in text:
                    return f"binary: a NUL byte at offset {position + chunk.index(0)}"
                if not chunk:
                    return ""
                position += len(chunk)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror or error})", "check the file") from None


def not_text(streams: Sequence[Stream], format: str) -> list[str]:
    """`FILE (why)` of each stream that is read as plain text and is not UTF-8 text.

    Args:
        format: as `data.source.format`.

    Raises:
        UserError: a file cannot be read.
    """
    return [
        f"{stream.relative_path} ({why})"
        for stream in streams
        if format_name(Path(stream.path), format) == "text" and (why := why_not_text(Path(stream.path)))
    ]


def describe(found: Sequence[str], num_files: int) -> str:
    """A sentence on what `not_text` found among so many files, and what to do."""
    what = f"{len(found):,} of {counted(num_files, 'file')} {'is' if len(found) == 1 else 'are'} not UTF-8 text"
    return f"{what}: {few(found)}; a run would read the bytes as they are; {FIX}"
