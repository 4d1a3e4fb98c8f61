"""Fingerprints of data files: enough to notice on a resume that a file has changed.

A mark is the file's size and a hash of blocks spread over it; a file no larger than these blocks is hashed whole. Times of
modification are not used: copying a corpus changes them, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainer.data.formats import files_of
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.wording import few

FINGERPRINT_KEY = "data"  # in a checkpoint's state.json
EVAL: Final = "eval/"  # before the name of a validation set in a fingerprint; names of sources have no slash
BLOCK_BYTES = 4096
# Blocks of a file: as many as keep all files within the total, which 50,000 files with two blocks each use up (400 MB).
FEWEST_BLOCKS, MOST_BLOCKS, TOTAL_BLOCKS = 2, 16, 100_000
THREADS, CHUNK = 8, 64  # a cold or remote disk answers several requests at once


@dataclass(frozen=True)
class Fingerprint:
    """The data files of a run.

    Args:
        blocks: sampled per file.
        tokenizer: mark of the tokenizer.json; empty without one.
        sources: source -> stream (relative path, in the order of the stream ids) -> mark.
    """

    blocks: int
    tokenizer: str
    sources: Mapping[str, Mapping[str, str]]

    def to_state(self) -> dict[str, Any]:
        """As JSON."""
        return {"blocks": self.blocks, "tokenizer": self.tokenizer, "sources": self.sources}

    @classmethod
    def from_state(cls, state: Any) -> Fingerprint:
        """The inverse of `to_state`.

        Raises:
            ValueError: the state is damaged.
        """
        known: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        blocks, tokenizer, sources = known.get("blocks"), known.get("tokenizer"), known.get("sources")
        files = list(sources.values()) if isinstance(sources, Mapping) else [None]
        is_whole = all(isinstance(each, Mapping) and all(isinstance(m, str) for m in each.values()) for each in files)
        if not is_whole or not isinstance(tokenizer, str) or type(blocks) is not int:
            raise ValueError("the fingerprint of the data is damaged")
        if not FEWEST_BLOCKS <= blocks <= MOST_BLOCKS:
            raise ValueError(f"the fingerprint of the data has {blocks} blocks per file")
        return cls(blocks, tokenizer, sources)  # type: ignore[arg-type]


def blocks_per_file(num_files: int) -> int:
    """Blocks to sample of each of so many files."""
    return min(max(TOTAL_BLOCKS // max(num_files, 1), FEWEST_BLOCKS), MOST_BLOCKS)


def mark_files(paths: Sequence[Sequence[Path]], *, blocks: int, whole: bool) -> list[str]:
    """The mark of each stream's files: `SIZE:SAMPLES`, with `whole` also `:CONTENT`; joined by `+` if there are several.

    Raises:
        UserError: a file cannot be read.
    """
    mark = partial(_mark, blocks=blocks, whole=whole)
    # In chunks: handing one file to a thread takes longer than reading its blocks.
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    with ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(lambda chunk: ["+".join(map(mark, files)) for files in chunk], chunks)
        return [each for chunk in done for each in chunk]


def stream_files(streams: Iterable[Stream], format: str) -> list[list[Path]]:
    """The files of each stream: its own, and the index beside it."""
    return [files_of(Path(stream.path), format) for stream in streams]


def _mark(path: Path, *, blocks: int, whole: bool) -> str:
    samples = hashlib.blake2b(digest_size=8)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            if size <= blocks * BLOCK_BYTES:
                samples.update(os.pread(descriptor, size, 0))
            else:  # the beginning, the end, and evenly spaced blocks in between
                for block in range(blocks):
                    samples.update(os.pread(descriptor, BLOCK_BYTES, (size - BLOCK_BYTES) * block // (blocks - 1)))
            mark = f"{size}:{samples.hexdigest()}"
            if whole:
                mark += ":" + hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path and its mode") from None
    return mark


@dataclass(frozen=True)
class SourceChange:
    """Streams of a source (relative paths) that differ from those of the checkpoint."""

    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = (("changed", self.changed), ("missing", self.missing), ("new", self.new))
        return ", ".join(f"{len(paths):,} {kind} ({few(paths)})" for kind, paths in kinds if paths)


@dataclass(frozen=True)
class DataChange:
    """What differs between the data of a checkpoint and now. A source that is new is not a change: blends may grow."""

    tokenizer: bool = False
    sources: Mapping[str, SourceChange] = field(default_factory=dict)
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.tokenizer or bool(self.sources or self.removed)

    def __str__(self) -> str:
        parts = ["the tokenizer.json changed"] if self.tokenizer else []
        parts += [f"source {name}: {change}" for name, change in self.sources.items()]
        return "; ".join([*parts, *(f"source {name}: not in the config" for name in self.removed)])


def compare(saved: Fingerprint, now: Fingerprint) -> DataChange:
    """What differs. Contents are compared where both sides have hashed them."""
    sources = {}
    for name in saved.sources.keys() & now.sources.keys():
        before, after = saved.sources[name], now.sources[name]
        if not before or not after:  # not files, or never read
            continue
        change = SourceChange(
            changed=[path for path in after if path in before and not _agree(before[path], after[path])],
            missing=[path for path in before if path not in after],
            new=[path for path in after if path not in before],
        )
        if change != SourceChange():
            sources[name] = change
    removed = sorted(name for name in saved.sources.keys() - now.sources.keys() if not name.startswith(EVAL))
    return DataChange(not _agree(saved.tokenizer, now.tokenizer), dict(sorted(sources.items())), removed)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The name of each file now -> the one that it had, where the name is another and the mark the same."""
    missing, found = defaultdict[str, list[str]](list), {}
    for path in sorted(before.keys() - after.keys(), reverse=True):
        missing[_samples(before[path])].append(path)
    for path in sorted(after.keys() - before.keys()):
        if (known := missing[_samples(after[path])]) and _agree(before[known[-1]], after[path]):
            found[path] = known.pop()
    return found


def _samples(mark: str) -> str:
    """A mark without the hashes of whole contents."""
    return "+".join(":".join(one.split(":")[:2]) for one in mark.split("+"))


def keep_contents(saved: Fingerprint, now: Fingerprint) -> Fingerprint:
    """`now`, with the hashed contents that only `saved` has of unchanged files: a later verification needs them."""

    def kept(before: str, after: str) -> str:
        return before if len(before) > len(after) and _agree(before, after) else after

    sources = {
        name: {path: kept(saved.sources.get(name, {}).get(path, ""), mark) for path, mark in files.items()}
        for name, files in now.sources.items()
    }
    return Fingerprint(now.blocks, kept(saved.tokenizer, now.tokenizer), sources)


def has_contents(fingerprint: Fingerprint) -> bool:
    """Whether the content of every file was hashed."""
    marks = [mark for files in fingerprint.sources.values() for mark in files.values()]
    return all(one.count(":") == 2 for mark in [*marks, fingerprint.tokenizer] if mark for one in mark.split("+"))


def _agree(one: str, other: str) -> bool:
    """Whether two marks may be of the same content."""
    first, second = one.split("+"), other.split("+")
    if len(first) != len(second):
        return False
    pairs = [(a.split(":"), b.split(":")) for a, b in zip(first, second, strict=True)]
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)
