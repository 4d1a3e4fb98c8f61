"""Assigning documents to streams, and choosing those that fit under a cap; no files, no randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from trainer.tools.corpus.documents import Document

MIN_STREAM_BYTES = 65_536
MISC = "misc"
MAX_NAME_BYTES = 200  # file systems allow 255, the extension included
Streams = dict[str, list[Document]]


def group_by_directory(documents: Sequence[Document], *, min_bytes: int) -> Streams:
    """One stream per directory of the sources; a directory with less than `min_bytes` joins its parent.

    Top directories below `min_bytes` form the stream `misc`; if that is too small itself it joins the smallest other
    stream. Streams are named after the directory, with dots: `numpy.linalg`; see `_stream_name`.
    """
    by_directory: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        by_directory.setdefault(PurePosixPath(document.source).parts[:-1], []).append(document)
    deepest = max((len(parts) for parts in by_directory), default=0)
    for depth in range(deepest, 0, -1):
        for parts in sorted(key for key in by_directory if len(key) == depth):
            if _size(by_directory[parts]) < min_bytes:
                small = by_directory.pop(parts)
                by_directory.setdefault(parts[:-1], []).extend(small)
    streams: Streams = {}
    for parts in sorted(key for key in by_directory if key):
        streams[_free_name(_stream_name(parts), streams)] = by_directory[parts]
    left_over = by_directory.get((), [])
    if left_over and streams and _size(left_over) < min_bytes:
        smallest = min(streams, key=lambda name: (_size(streams[name]), name))
        streams[smallest] = streams[smallest] + left_over
    elif left_over:
        streams[_free_name(MISC, streams)] = left_over
    return {name: sorted(streams[name], key=lambda document: document.source) for name in sorted(streams)}


def cap_evenly(streams: Mapping[str, Sequence[Document]], max_bytes: int, *, min_bytes: int) -> Streams:
    """At most `max_bytes` of text in total, in even shares; what a small stream does not need goes to the others.

    Within a stream documents are considered in the order of the SHA-256 of their source, and those that fit are taken.
    A stream that stays below `min_bytes` because its documents are larger than its share takes its smallest ones too;
    if it still stays below (one small document and a huge one), it is dropped.
    """
    chosen: Streams = {}
    left = max_bytes
    by_size = sorted(streams, key=lambda name: (_size(streams[name]), name))
    for position, name in enumerate(by_size):
        room = left // (len(by_size) - position)
        taken: list[Document] = []
        rest: list[Document] = []
        for document in sorted(streams[name], key=lambda d: hashlib.sha256(d.source.encode()).digest()):
            fits = document.num_bytes <= room
            (taken if fits else rest).append(document)
            room -= document.num_bytes if fits else 0
        left -= _size(taken)
        for document in sorted(rest, key=lambda d: (d.num_bytes, d.source)):
            if _size(taken) < min_bytes and document.num_bytes <= left:
                taken.append(document)
                left -= document.num_bytes
        if _size(taken) < min(min_bytes, _size(streams[name])):
            left += _size(taken)
        elif taken:
            chosen[name] = sorted(taken, key=lambda document: document.source)
    return {name: chosen[name] for name in sorted(chosen)}


def _size(documents: Sequence[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def _stream_name(parts: Sequence[str]) -> str:
    """`numpy.linalg`, without the `_` or `.` at its beginning: runs ignore files whose names begin so.

    A name that is too long for a file ends in a digest.
    """
    name = ".".join(parts).lstrip("._") or MISC
    encoded = name.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return name
    return f"{encoded[:MAX_NAME_BYTES].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:12]}"


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name
